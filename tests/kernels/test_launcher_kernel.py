"""The kernel that a launcher is put into: what it demands of calls, and how it is described."""

from __future__ import annotations

import fresh_process
import pytest
import torch

from opkit import _core
from opkit.kernels.cc import boilerplate
from opkit.op import torch_private as private

OUT = ("TENSOR", "out", "tensor_any")


def _none(fake):
    entry = fake.entry("none", [("ptr", 0, 0)])
    return lambda call: entry


def test_named_sizes_are_given_and_checked(fake):
    entry = fake.entry("none", [("i64", 0, 0), ("i64", 1, 0)])
    batch_d = {"before": [], "variadic": "batch", "after": ["d"]}
    op = fake.operator(
        "sized(Tensor x, Tensor weight) -> Tensor",
        [("NAMED_SIZE", 0, 0, -1, None, "int"), ("NAMED_SIZE", 0, 1, -1, None, "int"), OUT],
        lambda call: entry,
        shapes={"x": batch_d, "weight": {"before": ["d"], "variadic": None, "after": []}},
        size_names=["batch", "d"],
    )
    op(torch.ones(2, 3, 5), torch.ones(5))
    assert op.missed[0][:2] == [6, 5]
    with pytest.raises(
        RuntimeError, match=r"the argument weight has d 4 where 5 was expected; the kernel does not take"
    ):
        op(torch.ones(2, 3, 5), torch.ones(4))


def test_literal_and_unnamed_sizes(fake):
    shape = {"before": [2, None], "variadic": "", "after": [4]}
    op = fake.operator("sized(Tensor x) -> Tensor", [OUT], _none(fake), shapes={"x": shape})
    op(torch.ones(2, 9, 4))
    op(torch.ones(2, 9, 5, 5, 4))
    with pytest.raises(RuntimeError, match="the argument x has the size 5 where 4 was expected"):
        op(torch.ones(2, 9, 5))


def test_element_types_that_a_source_demands(fake):
    op = fake.operator("typed(Tensor x) -> Tensor", [("TENSOR", "x", 0, 6, None, "tensor"), OUT], _none(fake))
    op(torch.ones(2))
    with pytest.raises(RuntimeError, match="x has elements of type bfloat16 where float32 was expected"):
        op(torch.ones(2, dtype=torch.bfloat16))


def test_constants(fake):
    entry = fake.entry("none", [("i32", 0, 0), ("fp64", 1, 0)])
    rows = [("INT_CONSTANT", -1, 0, -1, 7, "exact"), ("FLOAT_CONSTANT", -1, 0, -1, 0.5, "float"), OUT]
    op = fake.operator("constant(Tensor x) -> Tensor", rows, lambda call: entry)
    op(torch.ones(2))
    assert op.missed[0][:2] == [7, 0.5]


def test_it_is_registered_and_sized_like_a_compiled_kernel(fake):
    add = fake.add()
    library = torch.library.Library("opkit_launched", "FRAGMENT")
    library.define(f"plain_{add.name}(Tensor x, Tensor y) -> Tensor")
    registration = add.library.register(f"opkit_launched::plain_{add.name}", "CPU", False)
    call = private.hidden_operator(f"opkit_launched::plain_{add.name}")
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="the sizes of its outputs are not known for arguments like these"):
        call(x, x)
    #                                                   x and y: tensors of rank 1, float32, contiguous; guard 1
    row = [1, 1, 6, 1]
    program = [*row, *row, 2, 0, 1, 6, 1, 4, 1, 0, 0, 0, 0]
    add.library.add_program([len(program) + 1, *program])
    assert torch.equal(call(x, x), 2 * x)
    add.library.forget_programs()
    with pytest.raises(RuntimeError, match="the sizes of its outputs are not known"):
        call(x, x)
    registration.remove()
    assert (add.library.operator_name, add.library.instance_count) == (f"t::{add.name}", 1)


def test_descriptions_that_do_not_fit_the_launcher(fake):
    for rows, message in (
        ([("TENSOR", "x", "int")], "x is a tensor and has another's role"),
        ([("NUMEL", "x", "tensor")], "x has a tensor's role and is none"),
        ([("NUMEL", "x", "ints")], 'x: the role "ints" is for lists of ints'),
        ([("NUMEL", "x", "text")], 'x: the role "text" is for strings'),
        ([("DATA", "x", "tensor")], "x has a tensor's role and is none"),
        ([("ADDRESS", "x", "tensor")], '"ADDRESS" is no source'),
    ):
        with pytest.raises(ValueError, match=message):
            fake.unregistered("odd(Tensor x) -> ()", rows, _none(fake))


def test_a_launcher_belongs_to_one_kernel(fake):
    op = fake.unregistered("one(Tensor x) -> ()", [("TENSOR", "x", "tensor")], _none(fake))
    description = op.description([("TENSOR", "x")], False, {})
    with pytest.raises(ValueError, match="its launcher is that of another kernel already"):
        _core.launch_kernel(description, op.launcher)
    fresh = _core.Launcher("t::one", "_k", ["tensor"], _none(fake), cuda=True)
    with pytest.raises(ValueError, match="its launcher is for another device"):
        _core.launch_kernel(description, fresh)
    fresh = _core.Launcher("t::one", "_k", [], _none(fake), cuda=False)
    with pytest.raises(ValueError, match="it has 1 sources, and the launcher 0 roles"):
        _core.launch_kernel(description, fresh)


def test_sources_are_numbered_as_in_opkit_h(fake):
    roles = {"TENSOR": "tensor", "PACKED_TENSOR": "tensor", "STRING": "text", "VALUES": "ints"}
    arguments = {"TENSOR": "x", "PACKED_TENSOR": "x", "STRING": "text", "VALUES": "many"}
    for number, name in enumerate(boilerplate.SOURCES):
        rows = [(name, arguments.get(name, "n"), roles.get(name, "int_width"))]
        schema = "all(Tensor x, int n, str text, int[] many) -> ()"
        op = fake.unregistered(schema, rows, _none(fake), size_names=["a", "b"])
        assert op.kernel.parameters[1].source == number
    with pytest.raises(ValueError, match='"NONE" is no source'):
        fake.unregistered("all(Tensor x) -> ()", [("NONE", "x", "int")], _none(fake))


def test_sources_of_what_is_not_there(fake):
    for row, message in (
        (("SCALAR", 1, 0, -1, None, "int"), "a source asks for the argument 1, which is not there"),
        (("TENSOR", 2, 0, -1, None, "tensor"), "a source asks for the argument 2, which is not there"),
        (("TENSOR", -1, 0, -1, None, "tensor"), "a source asks for the argument -1, which is not there"),
        (("NAMED_SIZE", 0, 0, -1, None, "int"), "a source asks for a size that has no name"),
    ):
        with pytest.raises(ValueError, match=message):
            fake.unregistered("few(Tensor x) -> Tensor", [row], _none(fake))


def test_kinds_and_names_that_are_none(fake):
    op = fake.unregistered("one(Tensor x) -> ()", [("TENSOR", "x", "tensor")], _none(fake))
    description = op.description([("TENSOR", "x")], False, {})
    row = description["arguments"][0]
    fresh = _core.Launcher("t::one", "_k", ["tensor"], _none(fake), cuda=False)
    with pytest.raises(ValueError, match='"tensr" is no kind of an argument'):
        _core.launch_kernel(description | {"arguments": [row | {"kind": "tensr"}]}, fresh)
    shape = {"before": ["d"], "variadic": None, "after": []}
    with pytest.raises(ValueError, match='"d" is not among the names of sizes'):
        _core.launch_kernel(description | {"arguments": [row | {"shape": shape}]}, fresh)


_REUSE = """
from opkit import _core
description = dict(operator="t::x", kernel="_k", schema="", cuda=False, arguments=[], outputs=[], size_names=[], sources=[])
make = lambda: _core.launch_kernel(description, _core.Launcher("t::x", "_k", [], None, cuda=False))
for i in range(3000):
    make()
kept = [make() for i in range(1024)]
del kept[7]
make()
print("room")
"""
_EXHAUST = """
from opkit import _core
description = dict(operator="t::x", kernel="_k", schema="", cuda=False, arguments=[], outputs=[], size_names=[], sources=[])
kept = [_core.launch_kernel(description, _core.Launcher("t::x", "_k", [], None, cuda=False)) for i in range(1025)]
"""


@pytest.mark.exhaustive
def test_a_process_has_so_many_of_them(tmp_path):
    result = fresh_process.run(["-c", _EXHAUST], cwd=tmp_path, check=False)
    message = (
        "RuntimeError: opkit: t::x, kernel _k: a process can have 1024 kernels that are launched, and they are used up"
    )
    assert message in result.stderr


def test_kernels_that_are_gone_make_room(tmp_path):
    result = fresh_process.run(["-c", _REUSE], cwd=tmp_path)
    assert (result.stdout, result.stderr) == ("room\n", "")


def test_a_registration_keeps_the_kernel(fake):
    """The dispatcher's function serves no other kernel while the operator is registered."""
    add = fake.add()
    x = torch.ones(3)
    add.library = None
    for _ in range(1200):
        fake.unregistered("other(Tensor x) -> ()", [("TENSOR", "x", "tensor")], _none(fake))
    assert torch.equal(add(x, x), 2 * x)
