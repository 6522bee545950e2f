"""Mutation testing of opkit.check: right operators, what is made wrong in their sources, and whether a check sees it.

A mutant is the source of a module with one place made wrong by a script (``mutation_c.py``, ``mutation_python.py``).
:func:`judge` imports it, checks its operator property by property, and stops at the first that fails.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import mutation_c
import mutation_python

import opkit
from opkit.contract import run

ROOT = Path(__file__).parents[2]
_OWN = Path("tests/contract/mutants")


@dataclasses.dataclass(frozen=True)
class Target:
    """A right operator.

    Attributes:
        name: of the operator.
        path: the file that is mutated.
        build: the function that gives ``op``, ``args`` and ``reference``: in the file itself, or in ``mutants/project.py``.
        c: how C source in the file begins.
        python: functions of the file, and their roles.
    """

    name: str
    path: Path
    build: str
    c: str = ""
    python: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One place of a target's file made wrong."""

    target: str
    defect: str
    what: str
    source: str

    @property
    def name(self) -> str:
        return f"{self.target} {self.defect} {self.what}"


def _native(name: str) -> Target:
    return Target(name, _OWN / "native.py", f"build_{name}", f"\nvoid {name}(")


def _library(name: str, *roles: str) -> Target:
    endings = {"kernel": "kernel", "fake": "fake", "gradient": "backward"}
    parts = tuple((f"{name}_{endings[role]}", role) for role in ("kernel", *roles))
    return Target(name, _OWN / "library.py", f"build_{name}", "", parts)


def _project(name: str, path: str, build: str, *functions: tuple[str, str], c: str = "") -> Target:
    return Target(name, Path(path), build, c, functions)


def _kernels(name: str, file: str, *functions: tuple[str, str]) -> Target:
    return _project(name, f"examples/kernels/{file}", name, *functions)


_FUNCTIONAL = "opkit/nn/functional.py"
TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        *map(_native, ("softsign", "dot", "gather", "trace", "cumulated", "scale_rows", "masked_mean", "histogram")),
        *(_library(name, "fake", "gradient") for name in ("softplus", "window_mean", "scores", "moments", "swapped", "segments")),
        _library("ema"),
        _project("c_rms_norm", "examples/c_kernel.py", "c_kernel", c="\n    void rms_norm("),
        _project("c_silu_mul", "examples/packaged_op/packaged_op/silu_mul.c", "silu_mul", c="void silu_mul("),
        _project("nn_rms_norm", _FUNCTIONAL, "rms_norm", ("rms_norm", "reference")),
        _project("nn_rotary", _FUNCTIONAL, "rotary_embedding", ("rotary_embedding", "reference")),
        _project("nn_cross_entropy", _FUNCTIONAL, "cross_entropy", ("cross_entropy", "reference")),
        _kernels("rms_norm", "rms_norm.py", ("rms_norm_backward", "gradient"), ("_gradients", "gradient")),
        _kernels("softmax", "softmax.py", ("softmax", "reference"), ("softmax_backward", "gradient")),
        _kernels("swiglu", "glu.py", ("swiglu", "reference"), ("swiglu_backward", "gradient")),
        _kernels("geglu", "glu.py", ("geglu", "reference"), ("geglu_backward", "gradient")),
        _kernels("layer_norm", "layer_norm.py", ("layer_norm", "reference"), ("layer_norm_backward", "gradient")),
        _kernels("add_rms_norm", "add_rms_norm.py", ("add_rms_norm", "reference"), ("add_rms_norm_backward", "gradient")),
    )
}  # fmt: skip
"""The operators, by name."""


def mutants(target: Target) -> Iterator[Mutant]:
    """Everything that the rules make wrong in a target."""
    source = (ROOT / target.path).read_text(encoding="utf-8")
    if target.c:
        text = _c_source(source, target)
        for defect, what, made in mutation_c.mutants(text):
            yield Mutant(target.name, defect, what, source.replace(text, made))
    for function, role in target.python:
        for defect, what, made in mutation_python.mutants(source, function, role):
            yield Mutant(target.name, defect, what, made)


def _c_source(source: str, target: Target) -> str:
    if target.path.suffix == ".c":
        return source
    strings = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return next(text for text in strings if isinstance(text, str) and text.startswith(target.c))


def spread(found: Sequence[Mutant], most: int) -> list[Mutant]:
    """At most so many mutants of each class and target, from all over the source."""
    groups: dict[tuple[str, str], list[Mutant]] = {}
    for mutant in found:
        groups.setdefault((mutant.target, mutant.defect), []).append(mutant)
    return [
        group[n * len(group) // min(most, len(group))]
        for group in groups.values()
        for n in range(min(most, len(group)))
    ]


def original(target: Target) -> Mutant:
    """The target as it is."""
    return Mutant(target.name, "none", "nothing", (ROOT / target.path).read_text(encoding="utf-8"))


def judge(
    mutant: Mutant, max_examples: int = 50, dearest: float = 0.1, every: bool = False, whole: bool = False
) -> dict[str, Any]:
    """Check a mutant's operator; by what it was found out, if it was.

    Args:
        mutant: what is checked.
        max_examples: see :func:`opkit.check`.
        dearest: properties are left out of which a case takes longer.
        every: go on after a failure.
        whole: in one check. Otherwise property by property, which ends sooner.
    """
    warnings.simplefilter("ignore")
    started, failures, skipped = time.monotonic(), [], []
    try:
        built = _built(mutant)
    except Exception as error:  # what cannot be defined is found out before any check
        return {
            "failures": [["definition", f"{type(error).__name__}: {error}", ""]],
            "seconds": time.monotonic() - started,
        }
    names = [prop.name for prop in run.chosen(None, ()) if prop.cost <= dearest]
    for each in [names] if whole else [[name] for name in names]:
        report = opkit.check(**built, properties=each, max_examples=max_examples, database=False)
        failures += [[each.property, each.message, str(each.case)] for each in report.failures]
        skipped += [[each.property, each.reason] for each in report.skipped]
        if failures and not every:
            break
    return {"failures": failures, "skipped": skipped, "seconds": round(time.monotonic() - started, 2)}


def _built(mutant: Mutant) -> dict[str, Any]:
    target = TARGETS[mutant.target]
    own = target.path.is_relative_to(_OWN)
    project = None if own else _module(ROOT / _OWN / "project.py", "mutants_project")
    if target.path.suffix == ".c":
        return getattr(project, target.build)(mutant.source)
    sys.path.insert(0, str((ROOT / target.path).parent))
    renamed = mutant.source.replace('custom_op("', 'custom_op("mutated_')
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"mutated_{target.path.name}"
        path.write_text(renamed, encoding="utf-8")
        module = _module(path, path.stem)
    return getattr(module, target.build)() if own else getattr(project, target.build)(module)


def _module(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
