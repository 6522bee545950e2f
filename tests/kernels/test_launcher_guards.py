"""Which calls share an entry: each role of a source says what of its value counts."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from opkit import _core

INT = {
    "int": [(17, 18), (16, 32), (0, 16), (1 << 40, (1 << 40) + 16), (-1, -2), (-16, 16)],
    "int_noalign": [(16, 17), (3, 2), (1 << 40, (1 << 40) + 1)],
    "int_width": [(1, 16), (2, 3), (2**31 - 1, -(2**31)), (2**31, -(2**31) - 1)],
    "exact": [(7, 7)],
}
OTHER_INT = {
    "int": [(1, 2), (16, 17), (17, 1), (2**31 - 1, 2**31), (2**35, 2**35 + 1), (-(2**31), -(2**31) - 1)],
    "int_noalign": [(1, 16), (2**31 - 1, 2**31)],
    "int_width": [(2**31 - 1, 2**31), (-(2**31), -(2**31) - 1)],
    "exact": [(7, 8), (0, 1), (0, 2**33)],
}
_PAIRS = [(role, a, b, True) for role, rows in INT.items() for a, b in rows] + [
    (role, a, b, False) for role, rows in OTHER_INT.items() for a, b in rows
]


def _entries(fake, kind, role, values, source="SCALAR"):
    rows = [(source, "n", role), ("TENSOR", "out", "tensor_any")]
    entry = fake.entry("none", [("ptr", 1, 0)])
    op = fake.operator(f"guarded(Tensor x, {kind} n) -> Tensor", rows, lambda call: entry)
    for value in values:
        op(torch.ones(2), value)
    return op


def test_ints(fake):
    for role, a, b, same in _PAIRS:
        op = _entries(fake, "int", role, [a, b, a, b])
        assert [values[0] for values in op.missed] == ([a] if same else [a, b]), (role, a, b)
        assert op.launcher.entries == len(op.missed), (role, a, b)


def test_floats(fake):
    for role, a, b, same in (
        ("float", 0.5, 2.0, True),
        ("float_exact", 0.5, 0.5, True),
        ("float_exact", 0.5, math.nextafter(0.5, 1), False),
        ("float_exact", 0.0, -0.0, False),
        ("float_exact", math.nan, math.nan, True),
        ("exact", 0.5, 0.25, False),
    ):
        op = _entries(fake, "float", role, [a, b, a])
        assert len(op.missed) == (1 if same else 2), (role, a, b)
        assert struct.pack("d", op.missed[0][0]) == struct.pack("d", a), (role, a, b)


def test_bools(fake):
    for role, kinds in (("bool", 1), ("exact", 2)):
        op = _entries(fake, "bool", role, [True, False, True])
        assert [values[0] for values in op.missed] == [True, False][:kinds], role
        assert all(isinstance(values[0], bool) for values in op.missed), role


def test_dtypes_are_exact(fake):
    op = _entries(fake, "ScalarType", "exact", [torch.float32, torch.bfloat16, torch.float32])
    assert [values[0] for values in op.missed] == [6, 15]


def test_texts_are_exact(fake):
    texts = ["", "relu", "relu8byt", "relu8byts", "relu8bytz", "é" * 50]
    op = _entries(fake, "str", "text", [*texts, *texts], "STRING")
    assert [values[0] for values in op.missed] == texts


def test_a_text_may_be_none(fake):
    op = _entries(fake, "str?", "text", [None, "", None, ""], "STRING")
    assert [values[0] for values in op.missed] == [None, ""]


def test_lists_of_ints_are_exact(fake):
    lists = [[], [1], [1, 2], [2, 1], list(range(300)), [*range(299), 0]]
    op = _entries(fake, "int[]", "ints", [*lists, *lists], "VALUES")
    assert [list(values[0]) for values in op.missed] == lists


def test_a_list_may_be_none(fake):
    op = _entries(fake, "int[]?", "ints", [None, [], None, []], "VALUES")
    assert [values[0] for values in op.missed] == [None, ()]


def test_an_optional_number_is_none_or_not(fake):
    for kind, role, value in (
        ("int?", "int", 5), ("float?", "float", 0.5), ("bool?", "bool", False), ("int?", "exact", 0),
    ):  # fmt: skip
        op = _entries(fake, kind, role, [None, value, None, value], "SCALAR_POINTER")
        assert [values[0] for values in op.missed] == [None, value], (kind, role)
        assert type(op.missed[1][0]) is type(value), (kind, role)


def _tensors(fake, role, *tensors):
    entry = fake.entry("none", [("ptr", 0, 0)])
    rows = [("TENSOR", "x", role), ("TENSOR", "out", "tensor_any")]
    op = fake.operator("guarded(Tensor? x, Tensor y) -> Tensor", rows, lambda call: entry)
    for tensor in (*tensors, *tensors):
        op(tensor, torch.ones(2), layout=[6, 1, 2, 1])
    return len(op.missed)


def test_tensors_of_one_kind(fake):
    x = torch.empty(64)
    for role, kinds in (("tensor", 1), ("tensor_any", 1), ("info", 2)):
        assert _tensors(fake, role, x, torch.empty(8, 8)) == kinds


def test_misaligned_views_are_of_another_kind(fake):
    x = torch.empty(64)
    for role, kinds in (("tensor", 2), ("tensor_any", 1), ("info", 2)):
        assert _tensors(fake, role, x[0:8], x[1:9], x[4:12]) == kinds


def test_element_types_and_none_are_of_another_kind(fake):
    for role in ("tensor", "tensor_any", "info"):
        assert _tensors(fake, role, torch.empty(4), torch.empty(4, dtype=torch.bfloat16), None) == 3


def test_strides_count_where_the_whole_tensor_does(fake):
    x = torch.empty(8, 8)
    assert _tensors(fake, "tensor", x, x.t()) == 1
    assert _tensors(fake, "info", x, x.t(), x[:4], x[:, :4]) == 4


def test_keys_longer_than_the_stack_has_room_for(fake):
    count = 40
    arguments = ", ".join(f"Tensor x{i}" for i in range(count))
    entry = fake.entry("none", [("ptr", 0, 0)])
    rows = [("TENSOR", f"x{i}", "info") for i in range(count)]
    op = fake.operator(f"many({arguments}) -> Tensor", [*rows, ("TENSOR", "out", "info")], lambda call: entry)
    x = torch.empty(3, 4)
    for last in (x, x, torch.empty(4, 3), x):
        op(*[x] * (count - 1), last)
    assert len(op.missed) == 2


def test_the_device_always_counts(fake, tensor_at):
    entry = fake.entry("none", [("ptr", 0, 0)])
    op = fake.unregistered("on(Tensor x) -> ()", [("TENSOR", "x", "tensor_any")], lambda call: entry, cuda=True)
    for device in (0, 1, 0, 1):
        op.direct(tensor_at(64, device=device), stream=0x70)
    assert [values[0][2] for values in op.missed] == [0, 1]


def test_entries_are_forgotten_when_asked(fake):
    op = _entries(fake, "int", "exact", range(5))
    op.launcher.clear()
    assert op.launcher.entries == 0
    op(torch.ones(2), 3)
    assert len(op.missed) == 6


def test_the_table_is_bounded(fake):
    fake.library.fake_quiet(1)
    op = _entries(fake, "int", "exact", range(4096))
    assert op.launcher.entries == 4096
    op(torch.ones(2), 17)
    assert len(op.missed) == 4096
    op(torch.ones(2), 5000)
    assert op.launcher.entries == 1


def test_a_role_that_is_none_is_an_error():
    with pytest.raises(
        ValueError, match=r'"text\?" is no role of a source; the roles are tensor, tensor_any, info, int'
    ):
        _core.Launcher("t::x", "_k", ["text?"], lambda call: None, cuda=False)
