"""The operators of modules and packages are found, whoever registered them, and what is declared of them is read."""

import importlib
import itertools
import sys

import pytest

from opkit.contract import packages
from opkit.errors import ArgumentError

NUMBERS = itertools.count()

OPERATORS = """
import torch
import opkit
from torch import Tensor
from opkit.testing import tensor

@opkit.custom_op("{ns}::ours")
def ours(x: Tensor) -> Tensor:
    return x + 1

@torch.library.custom_op("{ns}::theirs", mutates_args=())
def theirs(x: Tensor) -> Tensor:
    return x + 1

library = torch.library.Library("{ns}", "FRAGMENT")
library.define("defined(Tensor x) -> Tensor")
library.define("defined.other(Tensor x, Tensor y) -> Tensor")
torch.library.define("{ns}::by_name", "(Tensor x) -> Tensor")

def plain(x: Tensor) -> Tensor:
    return x
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """``package(files)``: a package that was imported with all its modules: its name, its listing, what failed."""

    def made(files, only=""):
        name = f"packages_of_test_{next(NUMBERS)}"
        for file, text in {"__init__.py": "", **files}.items():
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(text.replace("{ns}", name), encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path))
        before = packages.registered()
        module = name + only
        importlib.import_module(module)
        failed = packages.import_submodules(module)
        return name, packages.listing(module, before), failed

    yield made
    for name in [each for each in sys.modules if each.startswith("packages_of_test_")]:
        del sys.modules[name]


def names(listing):
    return [target.name.split("::")[-1] for target in listing.targets]


ALL = ["ours", "theirs", "by_name", "defined", "defined.other"]


def test_all_kinds_of_operators_are_found(package):
    name, listing, failed = package({"__init__.py": OPERATORS})
    assert names(listing) == ALL
    assert {target.name.split("::")[0] for target in listing.targets} == {name}
    assert not failed
    assert not listing.left_out


def test_modules_below_a_package_are_imported(package):
    _, listing, failed = package(
        {
            "a/__init__.py": "",
            "a/deep.py": OPERATORS,
            "__main__.py": "raise AssertionError('a program was run')",
            "broken.py": "import nothing_of_that_name",
            "leaves.py": "raise SystemExit(3)",
        }
    )
    assert names(listing) == ALL
    assert [name.split(".", 1)[1] for name in failed] == ["broken", "leaves"]
    assert "ModuleNotFoundError: No module named 'nothing_of_that_name'" in next(iter(failed.values()))


def test_a_module_has_its_own_operators_alone(package):
    other = "import {ns}.one\n" + OPERATORS.replace("{ns}", "{ns}two")
    name, listing, _ = package({"one.py": OPERATORS, "two.py": other}, ".two")
    found = {target.name for target in listing.targets}
    assert {f"{name}two::{each}" for each in ALL} <= found
    assert found - {f"{name}two::{each}" for each in ALL} <= {f"{name}::by_name"}  # which says nowhere whose it is


def test_a_module_that_was_imported_before_is_read_again(package):
    name, _, _ = package({"__init__.py": OPERATORS})
    again = packages.listing(name, packages.registered())
    assert names(again) == ["ours", "theirs", "defined", "defined.other"]  # by_name says nowhere whose it is


def test_declarations_are_read(package):
    declared = """
OPKIT_CHECKS = {
    "{ns}::theirs": {"args": (tensor("n"),), "max_examples": 7},
    "plain": {"reference": plain},
    "{ns}::ours": "it is for somebody else",
}
"""
    name, listing, _ = package({"__init__.py": OPERATORS + declared})
    found = {target.name: target for target in listing.targets}
    assert found[f"{name}::theirs"].options["max_examples"] == 7
    assert found["plain"].op is sys.modules[name].plain
    assert listing.left_out == {f"{name}::ours": "it is for somebody else"}
    assert f"{name}::ours" not in found


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ("[1]", "is a dict from operators' names"),
        ("{'{ns}::theirs': 1}", "is a dict of arguments of opkit.check, or a text"),
        ("{'{ns}::theirs': {'arg': 1}}", "does not take 'arg'. It takes args, budget"),
        ("{'{ns}::nix': {}}", "names 'packages_of_test_.*::nix', which is no operator"),
        ("{'nix': {}}", "names 'nix', which is no operator and no attribute"),
    ],
)
def test_wrong_declarations_are_refused(package, declared, message):
    with pytest.raises(ArgumentError, match=message):
        package({"__init__.py": f"{OPERATORS}\nOPKIT_CHECKS = {declared}\n"})


def test_operators_are_named_in_several_ways(package):
    name, listing, _ = package({"__init__.py": OPERATORS})
    for wanted in ("theirs", f"{name}::theirs", "plain", "defined.other", "by_name"):
        (target,) = listing.named(name, [wanted]).targets
        assert target.name.split("::")[-1] == wanted.split("::")[-1]


def test_what_there_is_not_cannot_be_named(package):
    declared = 'OPKIT_CHECKS = {"{ns}::ours": "not for us"}'
    name, listing, _ = package({"__init__.py": OPERATORS + declared})
    with pytest.raises(ArgumentError, match=r"has no operator 'nix'. Its operators: .*::theirs"):
        listing.named(name, ["nix"])
    with pytest.raises(ArgumentError, match="left out: not for us"):
        listing.named(name, [f"{name}::ours"])
