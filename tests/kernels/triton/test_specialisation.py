"""The class of a call of a Triton kernel, and what was compiled for which calls."""

import dataclasses
import itertools
import json
import random

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from opkit.errors import KernelError
from opkit.kernels.aot_package import TritonBinary
from opkit.kernels.triton import specialisation, targets
from opkit.kernels.triton.binaries import Binary, Param
from opkit.kernels.triton.compiling import CompileRequest
from opkit.kernels.triton.specialisation import (
    Parameter,
    Pointer,
    Typed,
    form_of,
    parameters,
    pointer_type,
    relaxed,
    serves,
    specialise,
    specificity,
)

# By torch's ScalarType, which Python sees as an order of dtypes alone.
NUMBERS = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bool: 11,
    torch.bfloat16: 15,
    torch.float8_e5m2: 23,
    torch.float8_e4m3fn: 24,
    torch.float8_e5m2fnuz: 25,
    torch.float8_e4m3fnuz: 26,
    torch.uint16: 27,
    torch.uint32: 28,
    torch.uint64: 29,
}


class Memory:
    """What Triton asks of a tensor."""

    def __init__(self, dtype, address):
        self.dtype = dtype
        self.address = address

    def data_ptr(self):
        return self.address

    def ptr_range(self):
        return 2**40


@triton.jit
def plain(a, b, c, BLOCK: tl.constexpr):
    pass


@triton.jit(do_not_specialize=["a", 1])
def never(a, b, c, BLOCK: tl.constexpr):
    pass


@triton.jit(do_not_specialize_on_alignment=["a", "b"])
def unaligned(a, b, c, BLOCK: tl.constexpr):
    pass


@triton.jit
def annotated(a: tl.int64, b: "fp64", c: "*fp16", BLOCK: tl.constexpr):
    pass


@triton.jit
def more(a: tl.int32, b: "bool", c: tl.tensor, BLOCK: "tl.constexpr"):
    pass


@triton.jit
def constant(a: tl.const, b: "const *fp32", c: "u1", BLOCK: tl.constexpr):
    pass


@triton.jit(do_not_specialize=["a", "b", "c"])
def annotated_never(a: "i64", b: "u32", c: "bf16", BLOCK: tl.constexpr):
    pass


FUNCTIONS = [plain, never, unaligned, annotated, more, constant, annotated_never]
EDGES = [0, 1, 2, 15, 16, 17, 2**31 - 16, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 16, 2**64 - 1]
VALUES = [*EDGES, *(-value for value in EDGES if value <= 2**63), True, False, None, 0.0, 1.0, 16.0, float("nan")]


def theirs(function, backend, values):
    """What JITFunction.run makes of the arguments, before it compiles."""
    binder = create_function_from_signature(function.signature, function.params, backend)
    _, found, _ = binder(**values)
    signature = {name: entry[0] for name, entry in zip(function.arg_names, found, strict=True)}
    attributes = {name: entry[1] for name, entry in zip(function.arg_names, found, strict=True)}
    constants = {name for name, kind in signature.items() if kind == "constexpr"}
    divisible = {
        name
        for name, text in attributes.items()
        if name not in constants and isinstance(text, str) and ["tt.divisibility", 16] in backend.parse_attr(text)
    }
    return signature, constants, divisible


def ours(function, values):
    told = {
        name: Pointer(NUMBERS[value.dtype], value.address % 16 == 0) if isinstance(value, Memory) else value
        for name, value in values.items()
    }
    made = specialise(parameters(function), told)
    assert all(made.constexprs[name] is told[name] for name in made.constexprs)
    return made.signature, set(made.constexprs), set(made.divisible)


def compare(function, values):
    for target in (GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)):
        assert ours(function, values) == theirs(function, make_backend(target), values), (function, values)


def test_edges():
    for function, value in itertools.product(FUNCTIONS, VALUES):
        compare(function, {"a": value, "b": value, "c": value, "BLOCK": 128})


def test_tensors():
    for function, dtype, address in itertools.product(FUNCTIONS, NUMBERS, (0, 8, 16, 4096, 4098)):
        compare(function, {"a": Memory(dtype, address), "b": Memory(dtype, address), "c": 1, "BLOCK": None})


@pytest.mark.parametrize("calls", [150, pytest.param(400, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_many(function, calls):
    generator = random.Random(4)

    def value():
        kinds = [
            lambda: generator.choice(VALUES),
            lambda: generator.randrange(-(2 ** generator.randrange(64)), 2 ** generator.randrange(65)),
            lambda: 16 * generator.randrange(-(2**59), 2**59),
            lambda: Memory(generator.choice(list(NUMBERS)), generator.randrange(2**48)),
            generator.random,
        ]
        return generator.choice(kinds)()

    for _ in range(calls):
        compare(function, {"a": value(), "b": value(), "c": value(), "BLOCK": value()})


def test_descriptors():
    descriptor = TensorDescriptor.from_tensor(torch.zeros(64, 64, dtype=torch.bfloat16), [16, 64])
    values = {"a": descriptor, "b": 0, "c": 0, "BLOCK": 1}
    signature, _, _ = theirs(plain, make_backend(GPUTarget("cuda", 90, 32)), values)
    assert specialise(parameters(plain), values | {"a": Typed("tensordesc<bf16[16, 64]>")}).signature == signature


def test_numbers_of_dtypes_are_those_of_torch():
    from opkit.kernels.cc.dtypes import DTYPES

    assert {name: dtype.number for name, dtype in DTYPES.items() if "complex" not in name} == {
        str(dtype).removeprefix("torch."): number
        for dtype, number in NUMBERS.items()
        if dtype.itemsize > 1 or number < 20
    }


def test_what_triton_has_no_type_for_is_refused():
    with pytest.raises(KernelError, match="element type 9"):
        pointer_type(9)
    for value in ("text", 2**64, -(2**63) - 1, (1, 2), 1j):
        with pytest.raises(KernelError, match=r"the Triton parameter n has the value .*tl\.constexpr"):
            specialise((Parameter("n"),), {"n": value})
    with pytest.raises(KernelError, match="the Triton parameter n has no value"):
        specialise((Parameter("n"),), {"m": 1})


@triton.jit
def rows(x, out, x_stride_m1, d: "tl.int64", k, flag, BLOCK: tl.constexpr, ONE: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at * x_stride_m1, mask=at < d + k) * ONE, mask=at < d)


CALL = CompileRequest(
    rows,
    {
        "x": "*bf16", "out": "*bf16", "x_stride_m1": "constexpr", "d": "i64", "k": "i32", "flag": "constexpr",
        "BLOCK": "constexpr", "ONE": "constexpr",
    },
    {"x_stride_m1": 1, "flag": None, "BLOCK": 128, "ONE": 1},
    frozenset({"x", "out", "k"}),
    {"num_warps": 4},
)  # fmt: skip


def changed(form, **changes):
    merged = {
        name: {**getattr(form, name), **value} if isinstance(value, dict) else value for name, value in changes.items()
    }
    return dataclasses.replace(form, **merged)


def test_what_is_told_less():
    sizes, general = relaxed(CALL)
    assert sizes.divisible == {"x", "out"}
    assert sizes.constexprs == CALL.constexprs
    assert general.divisible == frozenset()
    assert general.signature["x_stride_m1"] == "i32"
    assert general.constexprs == {"flag": None, "BLOCK": 128, "ONE": 1}  # those that the author calls constants stay


def test_integers_of_64_bits_stay_so():
    assert relaxed(dataclasses.replace(CALL, wide=True))[-1].signature["x_stride_m1"] == "i64"


def test_nothing_is_made_twice():
    general = relaxed(CALL)[-1]
    assert relaxed(general) == []
    aligned = dataclasses.replace(general, divisible=frozenset({"x"}))
    assert len(relaxed(aligned)) == 1


def test_each_serves_those_that_are_told_more():
    listed = [form_of(each) for each in (CALL, *relaxed(CALL))]
    for i, built in enumerate(listed):
        for j, wanted in enumerate(listed):
            assert serves(built, wanted) == (i >= j)
    assert [max(listed, key=lambda built: specificity(built, listed[0]))] == listed[:1]


def test_other_calls_are_not_served():
    general = form_of(relaxed(CALL)[-1])
    assert serves(general, form_of(CALL))
    for changes in (
        {"source": "another"},
        {"target": "sm_100"},
        {"wide": True},
        {"offsets": True},
        {"options": {"num_warps": "8"}},
        {"options": {"num_stages": "2"}},
        {"signature": {"x": "*fp32"}},
        {"signature": {"k": "i64"}},
        {"signature": {"k": "u1"}},
        {"constexprs": {"BLOCK": "int 256"}},
        {"constexprs": {"BLOCK": "float 128"}},
        {"constexprs": {"flag": "int 1"}},
        {"constexprs": {"x_stride_m1": "int 2"}},
        {"constexprs": {"x_stride_m1": "bool True"}},
    ):
        assert not serves(general, changed(form_of(CALL), **changes)), changes


def test_none_is_no_pointer():
    given = changed(form_of(relaxed(CALL)[-1]), signature={"flag": "*fp32"})
    assert not serves(given, form_of(CALL))


def test_the_same_architecture_comes_first():
    old, new = (changed(form_of(CALL), target=target) for target in ("sm_80", "sm_86"))
    general = changed(form_of(relaxed(CALL)[-1]), target="sm_86")
    assert specificity(general, new) > specificity(old, new)


def test_which_architectures_run_a_binary():
    for built, device, runs in (
        ("sm_80", "sm_89", True),
        ("sm_89", "sm_80", False),
        ("sm_75", "sm_80", False),
        ("sm_90", "sm_90", True),
        ("sm_100", "sm_103", False),
        ("sm_120", "sm_121", False),
        ("gfx942", "gfx942", True),
        ("gfx942", "gfx950", False),
        ("sm_90", "gfx942", False),
    ):
        assert targets.runs(built, device) == runs, (built, device)


def test_a_form_is_the_same_in_each_process_and_place():
    assert form_of(CALL).source == specialisation.source_of(rows)
    text = json.dumps(dataclasses.asdict(form_of(CALL)))
    assert "0x" not in text
    assert str(form_of(CALL)) == (
        "x: *bf16, out: *bf16, d: i64, k: i32, x_stride_m1=1, flag=None, BLOCK=128, ONE=1, num_warps=4"
    )


BINARY = Binary(
    b"image", "cubin", "rows", 128, 0, (1, 1, 1), False, False, 0, 1, 0, 1, (Param("ptr", "x"), Param("map", "y", 0)),
    ({"name": "y", "block": [64, 64], "swizzle": 3},), "sm_90",
)  # fmt: skip


def entry():
    return TritonBinary("demo::odd name", "rows", "3.7", form_of(CALL), BINARY.to_json()).placed(b"image")


def test_an_entry_survives_json():
    assert TritonBinary.from_json(json.loads(json.dumps(entry().to_json()))) == entry()
    assert Binary.from_json(entry().launch, b"image") == BINARY
    assert entry().file.startswith("triton/demo.odd_name.rows.sm_90.")
    assert entry().size == 5


def test_names_that_lead_elsewhere_are_refused():
    for file in ("rows.cubin", "triton/../rows.cubin", "triton/rows.so", "/triton/rows.cubin", ""):
        said = None
        try:
            TritonBinary.from_json({**entry().to_json(), "file": file})
        except ValueError as error:
            said = str(error)
        assert "is not the name of a binary" in str(said), file
