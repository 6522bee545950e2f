"""What compiled functions are given."""

from __future__ import annotations

import re
import struct

import pytest
import torch

from opkit import _core


def _given(fake, kind: str, params, *values, source="SCALAR", **options):
    """The parameters of a launch, each as bytes."""
    entry = fake.entry("none", params, **options)
    rows = [("TENSOR", "x", "tensor_any"), (source, "n", "exact"), ("TENSOR", "out", "tensor_any")]
    op = fake.operator(f"takes(Tensor x, {kind} n) -> Tensor", rows, lambda call: entry)
    op(torch.ones(3, 5, 7)[:, :4], *values)
    return [bytes.fromhex(word) for word in fake.launches[-1][-1].split()]


def test_ints(fake):
    for kind, value, code in (
        *[(kind, -3, code) for kind, code in (("i8", "b"), ("i16", "h"), ("i32", "i"), ("i64", "q"))],
        *[(kind, 250, code) for kind, code in (("u8", "B"), ("u16", "H"), ("u32", "I"), ("u64", "Q"))],
        ("i1", 1, "?"),
        ("u1", 1, "?"),
        ("fp32", 3, "f"),
        ("fp64", 3, "d"),
    ):
        assert _given(fake, "int", [(kind, 1, 0)], value) == [struct.pack(code, value)], kind


def test_floats(fake):
    for value in (0.1, -1e30, 1e300, float("inf"), 5e-324, 0.0):
        expected = [torch.tensor(value, dtype=dtype).numpy().tobytes() for dtype in (torch.float32, torch.float64)]
        assert _given(fake, "float", [("fp32", 1, 0), ("fp64", 1, 0)], value) == expected, value


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> list[int]:
    return [word & 0xFFFF for word in values.to(dtype).view(torch.int16).tolist()]


def test_floats_of_16_bits_are_rounded_as_torch_rounds_them(fake):
    special = [0.0, -0.0, 65504.0, 65519.9, 65520.0, 1e-8, 2.0**-24, 2.0**-25, 1.5 * 2.0**-24, 2.0**-14, 1e38, -1e-40]
    random = torch.randn(200, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 5, 200)
    values = torch.cat([torch.tensor(special), random])  # float32, so that torch rounds once
    given = []
    for value in values.tolist():
        given += [_given(fake, "float", [("fp16", 1, 0), ("bf16", 1, 0)], value)]
    words = [[int.from_bytes(each, "little") for each in row] for row in given]
    assert [row[0] for row in words] == _rounded(values, torch.float16)
    assert [row[1] for row in words] == _rounded(values, torch.bfloat16)


def test_a_double_is_rounded_once(fake):
    tie = 1 + 2.0**-8 + 2.0**-40  # float32 drops the last bit, and what is left is half way between two bfloat16
    assert _given(fake, "float", [("bf16", 1, 0)], tie) == [(0x3F81).to_bytes(2, "little")]
    below = 1 + 3 * 2.0**-8 - 2.0**-40
    assert _given(fake, "float", [("bf16", 1, 0)], below) == [(0x3F81).to_bytes(2, "little")]


def test_not_a_number_stays_one(fake):
    half, brain = _given(fake, "float", [("fp16", 1, 0), ("bf16", 1, 0)], float("nan"))
    for word, dtype in ((half, torch.float16), (brain, torch.bfloat16)):
        assert torch.frombuffer(bytearray(word), dtype=dtype).isnan().all()


def test_bools_and_optional_numbers(fake):
    assert _given(fake, "bool", [("i1", 1, 0), ("i32", 1, 0)], True) == [b"\1", b"\1\0\0\0"]
    for value, expected in ((None, 0), (7, 7)):
        assert _given(fake, "int?", [("i32", 1, 0)], value, source="SCALAR_POINTER") == [expected.to_bytes(4, "little")]
    assert _given(fake, "float?", [("fp64", 1, 0)], 0.5, source="SCALAR_POINTER") == [struct.pack("d", 0.5)]


def test_constants_sizes_and_strides(fake):
    params = [("const", 0, -5), ("size32", 0, 0), ("size64", 0, -1), ("stride32", 0, 0), ("stride64", 0, -2)]
    given = _given(fake, "int", params, 0)
    assert [int.from_bytes(each, "little", signed=True) for each in given] == [-5, 3, 7, 35, 7]
    assert [len(each) for each in given] == [8, 4, 8, 4, 8]


def test_a_dimension_that_is_not_there_is_an_error(fake):
    for detail in (3, -4):
        with pytest.raises(RuntimeError, match=f"it takes dimension {detail} of x, which has 3"):
            _given(fake, "int", [("size32", 0, detail)], 0)


def test_sizes_of_none_are_zero(fake):
    entry = fake.entry("none", [("size32", 0, 9), ("stride64", 0, 0), ("ptr", 0, 0)])
    rows = [("TENSOR", "x", "tensor_any"), ("TENSOR", "out", "tensor_any")]
    fake.operator("absent(Tensor? x, Tensor y) -> Tensor", rows, lambda call: entry)(None, torch.ones(2))
    assert fake.launches[-1][-1] == "00000000 0000000000000000 0000000000000000"


def test_parameters_are_checked_against_the_compiled_function(fake):
    for name, message in (
        ("none 8 4", r"its compiled function takes 2 parameters, and 3 are given"),
        ("none 8 4 4", r"parameter 2 of its compiled function has 4 bytes, and i64 has 8"),
        ("none 8 4 128", r"parameter 2 of its compiled function has 128 bytes, and i64 has 8"),
    ):
        entry = _core.Entry(fake.binary(name), (1, 1, 1), [("ptr", 0, 0), ("i32", 1, 0), ("i64", 1, 0)])
        rows = [("TENSOR", "x", "tensor_any"), ("NUMEL", "x", "int"), ("TENSOR", "out", "tensor_any")]
        op = fake.operator("takes(Tensor x) -> Tensor", rows, lambda call, entry=entry: entry)
        with pytest.raises(RuntimeError, match=message):
            op(torch.ones(2))
    assert not fake.launches


def test_a_constant_fits_parameters_of_up_to_8_bytes(fake):
    entry = _core.Entry(fake.binary("none 1 2 4 8"), (1, 1, 1), [("const", 0, 1)] * 4)
    rows = [("TENSOR", "x", "tensor_any"), ("TENSOR", "out", "tensor_any")]
    fake.operator("takes(Tensor x) -> Tensor", rows, lambda call: entry)(torch.ones(2))
    assert fake.launches[-1][-1] == "01 0100 01000000 0100000000000000"


def test_many_parameters(fake):
    count = 100
    given = _given(fake, "int", [("const", 0, i) for i in range(count)], 0)
    assert [int.from_bytes(each, "little") for each in given] == list(range(count))[: len(given)]


def test_entries_that_do_not_hold_together(fake):
    for params, options, message in (
        ([("i24", 0, 0)], {}, '"i24" is no kind of a parameter; the kinds are ptr, i1, i8'),
        ([("map", 0, 0)], {}, "a parameter of the kind map asks for a map that is not there"),
        ([("offset", 0, 3)], {}, "a parameter of the kind offset has an axis from 0 to 2"),
        ([], {"grid": (-1, 1, 1)}, r"the grid \(-1, 1, 1\) is negative"),
        ([], {"grid": (2**31, 1, 1)}, r"the grid \(2147483648, 1, 1\) is larger than a GPU takes; launch it in chunks"),
        ([], {"grid": (2**30, 1, 1), "cluster": (2, 1, 1)}, "larger than a GPU takes"),
        ([], {"grid": (4, 1, 1), "chunk": (0, 1, 1)}, "of a grid must be positive"),
        ([("total", 0, 0)], {"grid": (2**31, 1, 1), "chunk": (2**30, 1, 1)}, "has 32 bits, too few for the grid"),
        ([], {"threads": 0}, "threads must be from 1 to 1024"),
        ([], {"threads": 2048}, "threads must be from 1 to 1024"),
        ([], {"shared": -1}, "shared must be a number of bytes"),
        ([], {"cluster": (0, 1, 1)}, "a cluster has at least one block"),
        ([], {"scratch": 8, "scratch_align": 3}, "its alignment a power of two"),
    ):
        said = None
        try:
            fake.entry("none", params, **options)
        except ValueError as error:
            said = str(error)
        assert re.search(message, str(said)), (params, options)
