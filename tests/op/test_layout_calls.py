"""Which calls can be laid out, from which function, and where the tracing happens."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import opkit
from opkit.op import torch_private as private
from opkit.op.layout.derivation import LayoutRefusal, derive
from opkit.op.layout.outputs import layout_of, operands
from opkit.op.layout.program import LayoutProgram, run

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


# ---- what cannot be laid out ----------------------------------------------------------------------------------------


def failing(x: Tensor) -> Tensor:
    return torch.from_numpy(np.sin(x.numpy()))


def dependent(x: Tensor) -> Tensor:
    return x.nonzero()


def expanded(x: Tensor) -> Tensor:
    return x.sum(0).expand(3, x.shape[1])


def sparse(x: Tensor) -> Tensor:
    return x.to_sparse()


def elsewhere(x: Tensor) -> Tensor:
    return torch.empty(3, device="meta")


def half_complex(x: Tensor) -> Tensor:
    return x.to(torch.complex32)


def split(x: Tensor) -> list[Tensor]:
    return list((x + 1).split(1))


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch says that its sparse tensors and complex32 are experimental
def test_what_cannot_be_laid_out(name):
    for function, error, words in (
        (failing, opkit.errors.RuleError, "register_fake"),
        (dependent, opkit.errors.RuleError, "depend on the data"),
        (expanded, opkit.errors.OutputError, "elements share memory"),
        (sparse, opkit.errors.OutputError, "dense"),
        (elsewhere, opkit.errors.OutputError, "is on meta"),
        (half_complex, opkit.errors.OutputError, "complex32"),
        (split, opkit.errors.KernelError, "a list of tensors|List"),
    ):
        operator = opkit.custom_op(name, function, mutates_args=())._operator
        with pytest.raises(error, match=words) as caught:
            pytest.fail(f"{function} gives {layout_of(operator, (torch.ones(2, 4),), {})}")
        assert operator.name in str(caught.value), function
        assert refusal_of(operator, torch.ones(2, 4)), function
        opkit.remove(name)


def test_the_note_names_the_line_that_leaves_torch(define):
    with pytest.raises(opkit.errors.RuleError) as caught:
        layout_of(define(failing), (torch.ones(2),), {})
    assert "torch.from_numpy(np.sin(x.numpy()))" in caught.value.__notes__[0]


def test_a_fake_implementation_is_used_where_there_is_one(name):
    op = opkit.custom_op(name, failing, mutates_args=())

    @op.register_fake
    def fake(x):
        torch.library.get_ctx()
        return x.new_empty(2 * x.shape[0], x.shape[1])

    operator = op._operator
    assert layout_of(operator, (torch.ones(3, 4),), {}) == [FLOAT32, 2, 6, 4, 4, 1]
    program = program_of(operator, torch.ones(3, 4))
    assert result(operator, program, torch.ones(5, 6)) == [FLOAT32, 2, 10, 6, 6, 1]
    op.register_fake(lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size()))
    with pytest.raises(opkit.errors.RuleError, match="depend on the data"):
        layout_of(operator, (torch.ones(3, 4),), {})
    assert "depend on the data" in refusal_of(operator, torch.ones(3, 4))


def test_outputs_that_are_arguments_are_left_out(name):
    @opkit.custom_op(name, mutates_args=("x",))
    def added(x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        return x.sum(0)

    operator = added._operator
    assert layout_of(operator, (torch.ones(3, 4), torch.ones(4)), {}) == [FLOAT32, 1, 4, 1]
    program = program_of(operator, torch.ones(3, 4), torch.ones(4))
    assert result(operator, program, torch.ones(5, 6), torch.ones(6)) == [FLOAT32, 1, 6, 1]


def test_an_operator_without_new_outputs_needs_no_trace(name):
    @opkit.custom_op(name, mutates_args=("x",))
    def filled(x: Tensor, n: int) -> None:
        x.numpy().fill(n)

    operator = filled._operator
    assert layout_of(operator, (torch.ones(3), 2), {}) == []
    program = program_of(operator, torch.ones(4, 3).t(), 2)
    assert result(operator, program, torch.ones(5, 3).t(), 3) == []
    assert result(operator, program, torch.ones(3, 5), 3) is None


# ---- where it happens -----------------------------------------------------------------------------------------------


def _plainly(call: Any) -> Any:
    return call()


def _in_inference_mode(call: Any) -> Any:
    with torch.inference_mode():
        return call()


def _under_autocast(call: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return call()


def _in_vmap(call: Any) -> Any:
    found = []
    torch.func.vmap(lambda x: found.append(call()) or x)(torch.ones(2))
    return found[0]


def _in_fake_mode(call: Any) -> Any:
    with torch._subclasses.FakeTensorMode():
        return call()


def _on_another_default_device(call: Any) -> Any:
    with torch.device("meta"):
        return call()


@pytest.mark.parametrize(
    "around", [_plainly, _in_inference_mode, _under_autocast, _in_vmap, _in_fake_mode, _on_another_default_device]
)
def test_the_callers_modes_do_not_matter(define, around, capfd):
    operator = define(lambda x, y: x @ y + torch.ones(1), schema="(Tensor x, Tensor y) -> Tensor")
    args = torch.ones(3, 4), torch.ones(4, 5)
    plain = program_of(operator, *args)
    assert around(lambda: layout_of(operator, args, {})) == [FLOAT32, 2, 3, 5, 5, 1]
    assert around(lambda: derive(operator, args, {})) == plain
    assert private.functorch_level() is None
    assert private.dispatch_modes() == 0
    assert torch.is_grad_enabled()
    assert capfd.readouterr().err == ""


def test_defaults_and_structured_arguments(define):
    def packed(
        x: Tensor, size: tuple[int, ...], pair: tuple[int, float], *, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        return x.new_empty(*size, pair[0], x.shape[0], dtype=dtype)

    operator = define(packed)
    args = (torch.ones(3), [2, 5], 4, 0.5)
    program = program_of(operator, *args)
    assert result(operator, program, *args) == layout_of(operator, args, {}) == [7, 4, 2, 5, 4, 3, 60, 12, 3, 1]
    assert result(operator, program, torch.ones(2), [7, 1], 3, 0.1) == [7, 4, 7, 1, 3, 2, 6, 6, 2, 1]
    assert result(operator, program, *args, dtype=torch.int8) is None
    assert layout_of(operator, args, {"dtype": torch.int8})[0] == 1


def test_a_tensor_that_is_no_argument_is_a_constant(define):
    table = torch.ones(5, 7)
    operator = define(lambda x: torch.cat([x, table]), schema="(Tensor x) -> Tensor")
    program = program_of(operator, torch.ones(3, 7))
    assert result(operator, program, torch.ones(6, 7)) == [FLOAT32, 2, 11, 7, 7, 1]
    assert result(operator, program, torch.ones(6, 8)) is None


@pytest.mark.skipif(not hasattr(torch.Tag, "inplace"), reason="in-place schemas came with torch 2.13")
def test_an_output_that_is_an_argument_has_no_layout(define):
    schema = "(Tensor(a!) x, Tensor y) -> Tensor(a!)"
    operator = define(lambda x, y: x.add_(y), schema=schema, mutates_args=("x",), tags=torch.Tag.inplace)
    assert layout_of(operator, (torch.ones(3), torch.ones(3)), {}) == []
    assert result(operator, program_of(operator, torch.ones(3), torch.ones(3)), torch.ones(4), torch.ones(4)) == []
