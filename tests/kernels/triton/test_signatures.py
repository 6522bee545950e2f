"""The class of a call is the one that Triton's own binder finds for the same arguments."""

import itertools
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
from opkit.kernels.triton.specialisation import Parameter, Pointer, Typed, parameters, pointer_type, specialise

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
