"""How programs are encoded, the arithmetic that they can do, and what is refused."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import opkit
from opkit.op.layout import program as p
from opkit.op.layout.derivation import LayoutRefusal, derive
from opkit.op.layout.outputs import layout_of, operands
from opkit.op.layout.program import LayoutProgram, run

HEADER = (Path(opkit.__file__).parent / "kernels/include/opkit.h").read_text()
FLOAT32 = 6


@pytest.fixture
def define(name: str) -> Any:
    """Make an operator of a function under a fresh name; gives what layouts are made of."""
    return lambda function, **options: opkit.custom_op(name, function, **{"mutates_args": (), **options})._operator


def kinds(program: LayoutProgram) -> list[str]:
    return [kind for _, kind in program.arguments]


def result(operator: Any, program: LayoutProgram, *args: Any, **kwargs: Any) -> list[int] | None:
    return run(program.words, kinds(program), operands(operator, args, kwargs))


def program_of(operator: Any, *args: Any, **kwargs: Any) -> LayoutProgram:
    program = derive(operator, args, kwargs)
    assert isinstance(program, LayoutProgram), program
    return program


def refusal_of(operator: Any, *args: Any) -> str:
    refusal = derive(operator, args, {})
    assert isinstance(refusal, LayoutRefusal), refusal
    assert operator.name in str(refusal)
    return str(refusal)


# ---- the encoding ---------------------------------------------------------------------------------------------------


def numbers(prefix: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(rf"\b{prefix}(\w+) = (\d+)", HEADER)}


def test_the_numbers_are_those_of_the_header():
    body = HEADER[HEADER.index("enum opk_dtype {") : HEADER.index("};", HEADER.index("enum opk_dtype {"))]
    dtypes = {name.lower(): int(value) for name, value in re.findall(r"OPK_(\w+) = (\d+)", body)}
    assert {str(dtype).removeprefix("torch."): number for dtype, number in p.DTYPES.items()} == dtypes
    codes = numbers("OPK_CODE_")
    assert codes
    assert {name: getattr(p, name) for name in codes} == codes


def test_a_small_program(define):
    def twice(x: Tensor, n: int, eps: float = 0.5) -> Tensor:
        return x.new_empty(x.shape[0], n)

    operator = define(twice)
    program = program_of(operator, torch.ones(4), 3)
    assert result(operator, program, torch.ones(7), 2) == [FLOAT32, 2, 7, 2, 2, 1]
    assert result(operator, program, torch.ones(7), 0) is None
    assert result(operator, program, torch.ones(1), 2) is None
    assert result(operator, program, torch.ones(7, dtype=torch.float64), 2) is None
    assert result(operator, program, torch.ones(14)[::2], 2) is None
    assert str(program).splitlines()[1:] == [
        "  for   x float32 of rank 1, n int, eps float",
        "  where (2 <= x.size(0))",
        "    and (1 <= n)",
        "  gives float32[x.size(0), n], row-major",
    ]


def test_strings_are_hashed_as_fnv_1a():
    assert p.string_hash("") == 0xCBF29CE484222325 - 2**64
    assert p.string_hash("a") == 0xAF63DC4C8601EC8C - 2**64
    assert p.string_hash("foobar") == 0x85944171F73967E8 - 2**64


def test_keys():
    for kind, value, words in (
        ("tensor", None, [0]),
        ("tensor", torch.empty(2, 3, dtype=torch.bfloat16).t(), [1, 2, 15, 0]),
        ("tensors", [torch.ones(2), torch.ones((), dtype=torch.bool)], [1, 2, 1, 6, 1, 0, 11, 1]),
        ("int", 5, [1]),
        ("float", None, [0]),
        ("bool", True, [1, 1]),
        ("dtype", torch.float16, [1, 5]),
        ("str", "a", [1, 0xAF63DC4C8601EC8C - 2**64]),
        ("ints", [1, 2, 3], [1, 3]),
        ("floats", [], [1, 0]),
        ("bools", [True, False], [1, 2, 1, 0]),
        ("ignored", object(), []),
    ):
        assert p.key([kind], [value]) == words, (kind, value)


def test_a_call_that_sizes_cannot_be_computed_for_is_unfit(define):
    def sized(n: int, m: int) -> Tensor:
        return torch.empty(n * m + n % m, dtype=torch.int8)

    program = program_of(define(sized), 5, 3)
    for call, size in (((6, 4), 26), ((5, 0), None), ((2**62, 2), None), ((-(2**63), -1), None)):
        found = run(program.words, kinds(program), call)
        assert (found and found[2]) == size, call


# ---- arithmetic -----------------------------------------------------------------------------------------------------

_NUMBERS = st.sampled_from(["n", "m", 0, 1, 2, 3, 4, 7, -1, -3])
_TREES = st.recursive(
    _NUMBERS,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["+", "-", "*", "//", "%", "min", "max", "?<", "?=="]), inner, inner),
        st.tuples(st.sampled_from(["ceil/", "floor/", "int/"]), inner, inner),
        st.tuples(st.sampled_from(["half", "square", "abs", "2.5", "/4+1.5", "if"]), inner),
    ),
    max_leaves=6,
)
_OPERATIONS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "min": torch.sym_min,
    "max": torch.sym_max,
    "?<": lambda a, b: a if a < b else b * 2,
    "?==": lambda a, b: a + 1 if a == b else b,
    "ceil/": lambda a, b: math.ceil(a / b),
    "floor/": lambda a, b: math.floor(a / b),
    "int/": lambda a, b: int(a / b),
    "half": lambda a: math.ceil(a * 0.5),
    "square": lambda a: a**2,
    "abs": lambda a: abs(a),
    "2.5": lambda a: math.floor(a * 2.5),
    "/4+1.5": lambda a: math.ceil(a / 4 + 1.5),
    "if": lambda a: a if a > 3.5 else 1 - a,
}
_TREE: list[Any] = [0]


def value(tree: Any, n: Any, m: Any) -> Any:
    if not isinstance(tree, tuple):
        return {"n": n, "m": m}.get(tree, tree)
    name, *rest = tree
    return _OPERATIONS[name](*[value(item, n, m) for item in rest])


@opkit.custom_op("layouts::expression", mutates_args=())
def expression(n: int, m: int) -> Tensor:
    return torch.empty(torch.sym_max(value(_TREE[0], n, m), 0), dtype=torch.int8)


def agrees(operator: Any, found: list[int], call: tuple[int, int]) -> bool:
    try:
        return found == layout_of(operator, call, {})
    except opkit.errors.OpkitError as error:  # sympy cancels n // n, so that n may be 0
        return "ZeroDivisionError" in str(error)


_CALLS = ((5, 3), (6, 2), (0, 1), (1, 0), (-7, 4), (8, -3), (100, 7), (2**40 + 1, 3), (2**53 + 1, 2), (2**62, 2**62))


@given(_TREES)
@settings(derandomize=True, max_examples=30, deadline=None)
def test_random_expressions(tree):
    check_programs_of(tree)


@pytest.mark.exhaustive
@given(_TREES)
@settings(derandomize=True, max_examples=150, deadline=None)
def test_more_random_expressions(tree):
    check_programs_of(tree)


def check_programs_of(tree):
    _TREE[0] = tree
    operator = expression._operator
    for at in _CALLS[:2]:
        program = derive(operator, at, {})
        if isinstance(program, LayoutRefusal):
            with pytest.raises(opkit.errors.OpkitError):
                layout_of(operator, at, {})
            continue
        for call in _CALLS:
            found = result(operator, program, *call)
            assert found is None or agrees(operator, found, call), f"{call} {tree}\n{program}"


# ---- floats ---------------------------------------------------------------------------------------------------------


def test_a_size_that_depends_on_a_float_holds_for_that_float_alone(define):
    def scaled(x: Tensor, scale: float, eps: float) -> Tensor:
        return x.new_empty(math.ceil(x.shape[0] * scale)) + eps

    operator = define(scaled)
    program = program_of(operator, torch.ones(8), 0.5, 1e-6)
    for size in (5, 9, 100):
        assert result(operator, program, torch.ones(size), 0.5, 3.0) == [FLOAT32, 1, (size + 1) // 2, 1]
    assert result(operator, program, torch.ones(8), 0.25, 1e-6) is None
    assert refusal_of(operator, torch.ones(8), 0.1, 1e-6).endswith("has too many digits")


def test_a_branch_on_a_float_holds_for_that_float_alone(define):
    def chosen(x: Tensor, eps: float) -> Tensor:
        return x + 1 if eps == 0 else x.sum(0)

    operator = define(chosen)
    program = program_of(operator, torch.ones(3, 4), 0.0)
    assert result(operator, program, torch.ones(3, 4), 0.0) == [FLOAT32, 2, 3, 4, 4, 1]
    assert result(operator, program, torch.ones(3, 4), 0.5) is None


@pytest.mark.parametrize("eps", [math.nan, math.inf, -0.0])
def test_floats_that_are_no_numbers(define, eps):
    operator = define(lambda x, eps: x + eps, schema="(Tensor x, float eps) -> Tensor")
    program = program_of(operator, torch.ones(3), eps)
    assert result(operator, program, torch.ones(5), eps) == [FLOAT32, 1, 5, 1]


def test_a_reference_that_wants_a_plain_float_gets_one(define):
    def plain(x: Tensor, scale: float) -> Tensor:
        return x.new_empty(x.shape[0] if type(scale) is float else 1)

    operator = define(plain)
    program = program_of(operator, torch.ones(3), 2.0)
    assert result(operator, program, torch.ones(5), 2.0) == [FLOAT32, 1, 5, 1]
    assert result(operator, program, torch.ones(5), 3.0) is None


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_calls_with_other_strides_pass_their_layout(define):
    operator = define(lambda x: x * 2, schema="(Tensor x) -> Tensor")
    assert "not row-major" in refusal_of(operator, torch.ones(4, 3).t())
    assert layout_of(operator, (torch.ones(4, 3).t(),), {}) == [FLOAT32, 2, 3, 4, 1, 3]
    program = program_of(operator, torch.ones(1, 3))
    odd = torch.empty_strided((1, 3), (100, 1))
    assert odd.is_contiguous()
    assert result(operator, program, odd) is None
    assert result(operator, program, torch.ones(1, 5)) == layout_of(operator, (torch.ones(1, 5),), {})


def test_what_no_program_can_test_is_refused(define):
    def filled(x: Tensor, device: torch.device | None = None) -> Tensor:
        return torch.zeros_like(x, device=device)

    operator = define(filled)
    assert "the argument device of type Device" in refusal_of(operator, torch.ones(3))
    assert layout_of(operator, (torch.ones(3),), {}) == [FLOAT32, 1, 3, 1]


def test_an_expression_without_code_is_named(define):
    def rooted(x: Tensor) -> Tensor:
        return x.new_empty(math.floor(x.shape[0] ** 0.5))

    assert "FloatPow" in refusal_of(define(rooted), torch.ones(9))


def test_guards_that_torch_leaves_out(define):
    from torch.fx.experimental import _config

    operator = define(lambda x: x * 2, schema="(Tensor x) -> Tensor")
    with _config.patch(backed_size_oblivious=True):
        assert "backed_size_oblivious" in refusal_of(operator, torch.ones(3))
