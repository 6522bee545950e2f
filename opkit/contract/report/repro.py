"""This module writes a stand-alone script that reproduces a failure."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch
from hypothesis.strategies import SearchStrategy

from opkit.contract.calls.cases import Case, TensorCase
from opkit.contract.calls.specs import TensorArgument
from opkit.contract.prop import Property
from opkit.contract.report.extraction import Extraction, literal
from opkit.contract.report.source import Origin, origin
from opkit.contract.subject import Subject

_FEW = 16  # elements that are written out, in a comment


def script(subject: Subject, prop: Property, case: Case) -> str:
    """Return a script that calls the operator with ``case``, checks the property, and shows how it fails.

    The script's exit status is 1 if the property fails, 0 if it holds, and 2 if it cannot be checked. Where the source of the
    operator was not found, a comment says what to fill in.
    """
    extraction = Extraction()
    try:
        op = origin(subject.target, "op", extraction)
        reference = _reference(subject, extraction)
    except Exception as error:  # odd source text must not cost the report
        op, reference = Origin((), "op", f"op = ...  # {type(error).__name__}: {error}"), Origin((), "None")
    text = _written(subject, prop, case, op, reference, extraction)
    try:
        compile(text, "repro", "exec")
    except SyntaxError:
        op = Origin((), "op", "op = ...  # its source could not be copied; import or define it here")
        text = _written(subject, prop, case, op, Origin((), "None"), Extraction())
    return text


def _reference(subject: Subject, extraction: Extraction) -> Origin:
    own = subject.operator is not None and subject.reference is subject.operator.reference
    if subject.reference is None or own:
        return Origin((), "None")
    return origin(subject.reference, "reference", extraction)


def _written(
    subject: Subject, prop: Property, case: Case, op: Origin, reference: Origin, extraction: Extraction
) -> str:
    copied = extraction.lines()
    names = sorted({"Case", "TensorCase", type(case).__name__, "load", "replay", "tensor"})
    future = [line for line in copied if line.startswith("from __future__")]
    missing = [text for text in (op.missing, reference.missing) if text]
    missing += [f"{name} = ...  # not found: give it its value here" for name in extraction.unknown]
    blocks = [
        f'"""{_safe(prop.name)} does not hold for {_safe(subject.name)}: {_safe(prop.rule)}\n\n'
        'Found by opkit.check. The script ends with 1 if it still fails, with 0 if it holds.\n"""',
        "\n".join(future),
        f"import torch\n\nfrom opkit.testing import {', '.join(names)}",
        "\n".join(dict.fromkeys((*op.lines, *reference.lines))),
        _fill_in(missing),
        "\n\n".join(line for line in copied if line not in future),
        f"op = {op.expression}" if op.expression != "op" else "",
        f"case = {written(case)}\n{_numbers(case)}",
        _replay(subject, prop, case, reference),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _safe(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"""', "'''")


def _fill_in(missing: list[str]) -> str:
    if not missing:
        return ""
    comments = [f"# TO FILL IN: {text}" for text in missing]
    stop = 'raise SystemExit("fill in what the comments above say, and take this line out")'
    return "\n".join(["import sys", *comments, 'print("The source of the operator was not found:", file=sys.stderr)',
                      f"print({missing!r}, file=sys.stderr)", f"sys.exit(2)  # {stop}"])  # fmt: skip


def _replay(subject: Subject, prop: Property, case: Case, reference: Origin) -> str:
    specs = [_spec(item, value) for item, value in zip(subject.spec.args, case.args, strict=False)]
    named = dict(case.kwargs)
    kwargs = [f"{name!r}: {_spec(item, named.get(name))}" for name, item in subject.spec.kwargs]
    arguments = [f"args=[{', '.join(specs)}]"]
    arguments += [f"kwargs={{{', '.join(kwargs)}}}"] if kwargs else []
    arguments += [f"reference={reference.expression}"] if reference.expression != "None" else []
    arguments += [f"device={subject.device!r}"] if subject.device != "cpu" else []
    return f'if __name__ == "__main__":\n    raise SystemExit(replay(op, {prop.name!r}, case, {", ".join(arguments)}))'


def _spec(item: Any, value: Any) -> str:
    """Write the argument's spec, for properties that draw more cases; a strategy becomes the value that it drew."""
    if isinstance(item, TensorArgument):
        return _tensor(item)
    if isinstance(item, list) and isinstance(value, (list, tuple)):
        return f"[{', '.join(_spec(each, one) for each, one in zip(item, value, strict=False))}]"
    return written(value if isinstance(item, SearchStrategy) else item)


def _tensor(item: TensorArgument) -> str:
    fields = {"optional": False, "low": None, "high": None, "layouts": None, "fills": None, "differentiable": True}
    rest = [f"{name}={getattr(item, name)!r}" for name, usual in fields.items() if getattr(item, name) != usual]
    dtypes = [] if item.dtypes is None else [f"dtypes={item.dtypes!r}"]
    shape = item.pattern.text  # without dtypes, which an annotation's pattern contains too
    return f"tensor({', '.join([repr(shape), *dtypes, *rest])})"


def written(value: Any) -> str:
    """Write a case, or a value of one, as a readable expression."""
    if isinstance(value, (Case, TensorCase)):
        return _dataclass(value)
    if isinstance(value, (list, tuple)):
        items = ", ".join(map(written, value))
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' if len(value) == 1 else ''})"
    if isinstance(value, enum.Enum):
        return f"load({type(value).__module__!r}, '').{type(value).__qualname__}.{value.name}"
    return literal(value) or repr(value)


def _dataclass(value: Any) -> str:
    fields = dataclasses.fields(value)
    changed = [f for f in fields if f.default is dataclasses.MISSING or getattr(value, f.name) != f.default]
    return f"{type(value).__name__}({', '.join(f'{f.name}={written(getattr(value, f.name))}' for f in changed)})"


def _numbers(case: Case) -> str:
    """Write the numbers in small tensors as comments."""
    lines = [
        f"# tensor {number}: {tensor}, {_values(tensor)}"
        for number, tensor in enumerate(case.tensors())
        if torch.Size(tensor.shape).numel() <= _FEW
    ]
    return "\n".join(lines)


def _values(tensor: TensorCase) -> str:
    try:
        return str(tensor.make().detach().tolist())
    except Exception as error:  # a comment is not worth a failure
        return f"not shown: {error}"
