"""An operator's life: redefinition, clashes, threads, removal, and its part of the key of torch's compile caches."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import threading
import typing
from pathlib import Path

import pytest
import torch
from torch import Tensor

import opkit
from opkit.errors import DefinitionError, NameClashError, RedefinitionWarning, UnknownOperatorError


def plain(x: Tensor) -> Tensor:
    return x.clone()


def test_redefinition_by_the_same_module_replaces_with_a_warning() -> None:
    first = opkit.custom_op("life::again", plain, mutates_args=())
    assert first(torch.ones(1)).item() == 1

    def doubled(x: Tensor) -> Tensor:
        return x * 2

    with pytest.warns(RedefinitionWarning, match="life::again was defined before"):
        second = opkit.custom_op("life::again", doubled, mutates_args=())
    assert second(torch.ones(1)).item() == 2
    assert torch.ops.life.again(torch.ones(1)).item() == 2
    assert opkit.get("life::again") is second


@pytest.mark.parametrize("remove_first", [False, True])
def test_collecting_an_operator_takes_nothing_from_its_successor(remove_first: bool) -> None:
    name = f"life::collected_{remove_first}"
    first = opkit.custom_op(name, plain, mutates_args=())
    cycle = [first]
    cycle.append(cycle)
    if remove_first:
        opkit.remove(name)
    with contextlib.nullcontext() if remove_first else pytest.warns(RedefinitionWarning):
        second = opkit.custom_op(name, plain, mutates_args=())
    packet = getattr(torch.ops.life, name.split("::")[1])
    del first, cycle
    gc.collect()
    assert getattr(torch.ops.life, name.split("::")[1]) is packet
    assert packet.default is second._opoverload


def test_a_failed_redefinition_keeps_the_old() -> None:
    def bad_type(x: Tensor, y: object) -> Tensor:
        return x

    opkit.custom_op("life::kept", plain, mutates_args=())
    with pytest.raises(DefinitionError):
        opkit.custom_op("life::kept", bad_type, mutates_args=())
    assert torch.ops.life.kept(torch.ones(1)).item() == 1


def test_reload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "reloaded_ops.py"
    text = "import opkit\nfrom torch import Tensor\n@opkit.custom_op('reloaded::op', mutates_args=())\n"
    text += "def op(x: Tensor) -> Tensor:\n    return x * {}\n"
    module.write_text(text.format(2))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loaded = importlib.import_module("reloaded_ops")
    assert loaded.op(torch.ones(1)).item() == 2
    module.write_text(text.format(30))
    with pytest.warns(RedefinitionWarning):
        importlib.reload(loaded)
    assert loaded.op(torch.ones(1)).item() == 30


def test_a_clash_says_who_holds_the_name() -> None:
    library = torch.library.Library("life_foreign", "DEF")
    library.define("held(Tensor x) -> Tensor")
    with pytest.raises(NameClashError, match=r"already defined by another library, registered at .*test_operator_life"):
        opkit.custom_op("life_foreign::held", plain, mutates_args=())

    torch.library.custom_op("life_foreign::torch_held", _from_elsewhere(), mutates_args=())
    with pytest.raises(NameClashError, match=r"torch.library.custom_op in elsewhere"):
        opkit.custom_op("life_foreign::torch_held", plain, mutates_args=())

    opkit.custom_op("life_foreign::ours", _from_elsewhere(), mutates_args=())
    with pytest.raises(NameClashError, match="already defined by the module elsewhere"):
        opkit.custom_op("life_foreign::ours", plain, mutates_args=())


def _from_elsewhere() -> typing.Any:
    def elsewhere(x: Tensor) -> Tensor:
        return x.clone()

    elsewhere.__module__ = "elsewhere"
    return elsewhere


def test_definition_from_many_threads() -> None:
    failures: list[BaseException] = []

    def define(i: int) -> None:
        try:
            op = opkit.custom_op(f"life_threads::op{i}", plain, mutates_args=())
            assert op(torch.ones(1)).item() == 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=define, args=(i,)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sum(op.name.startswith("life_threads::") for op in opkit.operators()) == 24


def test_removal() -> None:
    op = opkit.custom_op("life::removed", plain, mutates_args=())
    opkit.remove("life::removed")
    assert not hasattr(torch.ops.life, "removed")
    with pytest.raises(UnknownOperatorError):
        opkit.get("life::removed")
    with pytest.raises(UnknownOperatorError):
        opkit.remove("life::removed")
    del op


def test_unknown_operators_are_answered_with_near_names() -> None:
    opkit.custom_op("life::familiar", plain, mutates_args=())
    with pytest.raises(UnknownOperatorError, match="Did you mean life::familiar"):
        opkit.get("life::familar")


def test_the_users_own_cache_tag_is_kept_and_joined() -> None:
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    op = opkit.custom_op("identity::doubled", doubled)
    before = torch.compiler.config.cache_key_tag
    try:
        for tag in ("mine", "set later"):
            torch.compiler.config.cache_key_tag = tag
            torch._dynamo.reset()
            torch.compile(lambda x: op(x), backend="aot_eager")(torch.ones(3))
            assert torch.compiler.config.cache_key_tag.startswith(f"{tag}|opkit:")
    finally:
        torch.compiler.config.cache_key_tag = before


def test_operators_that_are_not_compiled_leave_the_key_alone() -> None:
    def tripled(x: Tensor) -> Tensor:
        return x * 3

    before = torch.compiler.config.cache_key_tag
    op = opkit.custom_op("identity::tripled", tripled)
    op(torch.ones(2, requires_grad=True)).sum().backward()
    assert torch.compiler.config.cache_key_tag == before
