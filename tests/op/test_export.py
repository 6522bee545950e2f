"""torch.export keeps operators; AOTInductor fuses those without a kernel."""

from __future__ import annotations

import contextlib
import enum
import io

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opkit

# torch 2.13 copies its own deprecated tree specs in run_decompositions
pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`:FutureWarning"),
    pytest.mark.filterwarnings(
        "ignore:The given buffer is not writable:UserWarning"
    ),  # torch 2.11, as it loads a program
]


@opkit.custom_op("texport::norm")
def norm(x: Float[Tensor, "*batch d"], weight: Float[Tensor, "d"], eps: float = 1e-6) -> Float[Tensor, "*batch d"]:
    """Root-mean-square normalisation."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@opkit.custom_op("texport::norm_kernel")
def norm_kernel(
    x: Float[Tensor, "*batch d"], weight: Float[Tensor, "d"], eps: float = 1e-6
) -> Float[Tensor, "*batch d"]:
    """The same, with a kernel."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@norm_kernel.register_kernel("cpu")
def _(x, weight, eps=1e-6):
    scale = 1.0 / np.sqrt(np.square(x.numpy()).mean(-1, keepdims=True) + eps)
    return torch.from_numpy((x.numpy() * scale * weight.numpy()).astype(np.float32))


OPS = {"reference": norm, "kernel": norm_kernel}


class Model(torch.nn.Module):
    def __init__(self, op, spelling="object"):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.op = op if spelling == "object" else getattr(torch.ops.texport, op.name.split("::")[1])

    def forward(self, x):
        return torch.relu(self.op(x + 1, self.weight)) * 2


def expected(model, x):
    return torch.relu(norm.reference(x + 1, model.weight)) * 2


def targets(program):
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def calls(program, op):
    return sum(op.name.replace("::", ".") in target for target in targets(program))


@pytest.fixture
def name(request):
    """A name for an operator that this test alone defines."""
    words = "".join(c if c.isalnum() else "_" for c in request.node.name)
    yield f"texport::{words}"
    with contextlib.suppress(opkit.errors.UnknownOperatorError):
        opkit.remove(f"texport::{words}")


@pytest.mark.sweep
@pytest.mark.parametrize("kind", OPS)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("spelling", ["object", "torch.ops"])
def test_export_keeps_the_operator(kind, strict, spelling):
    model, x = Model(OPS[kind], spelling), torch.randn(4, 8)
    program = torch.export.export(model, (x,), strict=strict)
    assert calls(program, OPS[kind]) == 1
    torch.testing.assert_close(program.module()(x), expected(model, x))


@pytest.mark.parametrize("kind", OPS)
def test_save_and_load(kind):
    model, x = Model(OPS[kind]), torch.randn(4, 8)
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (x,)), file)
    file.seek(0)
    program = torch.export.load(file)
    assert calls(program, OPS[kind]) == 1
    torch.testing.assert_close(program.module()(x), expected(model, x))


@pytest.mark.sweep
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", OPS)
def test_run_decompositions(kind, strict):
    model, x = Model(OPS[kind]), torch.randn(4, 8)
    program = torch.export.export(model, (x,), strict=strict).run_decompositions()
    if kind == "kernel":
        assert calls(program, OPS[kind]) == 1
    torch.testing.assert_close(program.module()(x), expected(model, x))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("kind", OPS)
@pytest.mark.parametrize("strict", [False, True])
def test_dynamic_shapes(kind, strict):
    model = Model(OPS[kind])
    rows, more = torch.export.Dim("rows", min=1), torch.export.Dim("more")
    program = torch.export.export(model, (torch.randn(4, 3, 8),), dynamic_shapes=({0: rows, 1: more},), strict=strict)
    assert calls(program, OPS[kind]) == 1
    modules = program.module(), program.run_decompositions().module()
    for shape in ((4, 3, 8), (7, 2, 8), (2, 9, 8), (3, 3, 8)):
        x = torch.randn(shape)
        for module in modules:
            torch.testing.assert_close(module(x), expected(model, x))


def test_data_dependent_sizes(name):
    op = opkit.custom_op(name, lambda x: x.nonzero().squeeze(1), schema="(Tensor x) -> Tensor")

    class Picks(torch.nn.Module):
        def forward(self, x):
            return op(x) * 2

    program = torch.export.export(Picks(), (torch.tensor([0.0, 1, 2]),))
    assert calls(program, op) == 1
    x = torch.tensor([1.0, 0, 2])
    torch.testing.assert_close(program.module()(x), torch.tensor([0, 4]))


def test_an_exported_operator_that_writes(name):
    @opkit.custom_op(name, mutates_args=("x",))
    def op(x: Tensor, y: Tensor) -> None:
        x.add_(y)

    class Writes(torch.nn.Module):
        def forward(self, x, y):
            z = x.clone()
            op(z, y)
            return z

    x, y = torch.randn(3), torch.randn(3)
    program = torch.export.export(Writes(), (x, y))
    assert calls(program, op) == 1
    torch.testing.assert_close(program.module()(x, y), x + y)
    torch.testing.assert_close(program.run_decompositions().module()(x, y), x + y)


def test_an_exported_opaque_operator(name):
    op = opkit.custom_op(name, lambda x: torch.from_numpy(np.sin(x.numpy())), schema="(Tensor x) -> Tensor")
    op.register_fake(torch.empty_like)

    class Sine(torch.nn.Module):
        def forward(self, x):
            return op(x) + 1

    x = torch.randn(3)
    program = torch.export.export(Sine(), (x,)).run_decompositions()
    assert calls(program, op) == 1
    torch.testing.assert_close(program.module()(x), x.sin() + 1)


class Mode(enum.Enum):
    PLUS = 1
    MINUS = -1


def test_structured_arguments(name):
    @opkit.custom_op(name, mutates_args=())
    def op(pair: tuple[Tensor, Tensor], mode: Mode) -> dict[str, Tensor]:
        return {"sum": pair[0] + pair[1] * mode.value, "first": pair[0] * 2}

    class Structured(torch.nn.Module):
        def forward(self, x, y):
            found = op((x, y), Mode.MINUS)
            return found["sum"] + found["first"]

    x, y = torch.randn(3), torch.randn(3)
    file = io.BytesIO()
    torch.export.save(torch.export.export(Structured(), (x, y)), file)
    file.seek(0)
    program = torch.export.load(file)
    assert calls(program, op) == 1
    torch.testing.assert_close(program.module()(x, y), x * 3 - y)


def test_a_training_export_differentiates():
    model, x = Model(norm_kernel), torch.randn(4, 8)
    exported = torch.export.export(model, (x,)).module()
    exported(x).sum().backward()
    expected(model, x).sum().backward()
    torch.testing.assert_close(exported.weight.grad, model.weight.grad)


@pytest.mark.exhaustive  # the tests of fusion under torch.compile cover nearly the same
def test_aotinductor_fuses_and_gives_the_right_numbers(tmp_path):
    from torch._inductor import aoti_compile_and_package, aoti_load_package
    from torch._inductor.utils import run_and_get_cpp_code

    model = Model(norm)
    program = torch.export.export(model, (torch.randn(4, 8),), dynamic_shapes=({0: torch.export.Dim("rows")},))
    with torch.no_grad():
        path, code = run_and_get_cpp_code(aoti_compile_and_package, program, package_path=str(tmp_path / "model.pt2"))
    loaded = aoti_load_package(path)
    for rows in (4, 7):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(loaded(x), expected(model, x))
    statements = [line.split("//")[0] for line in code.splitlines()]
    assert any("cpp_fused" in line for line in statements)
    assert [line for line in statements if "texport::" in line or "proxy_executor_call" in line] == []


class Attention(torch.nn.Module):
    def forward(self, q: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return opkit.attention(q, q, q, bias=lambda s, b, h, i, j: s * 2 + table[(i - j).abs()])


@pytest.mark.exhaustive
def test_aotinductor_passes_none_for_empty_lists(tmp_path):
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    given = torch.randn(1, 2, 6, 8), torch.randn(6)
    program = torch.export.export(Attention(), given)
    loaded = aoti_load_package(aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2")))
    torch.testing.assert_close(loaded(*given), Attention()(*given))


def test_exported_graphs_hold_the_overload_that_torch_ops_has_after_a_kernel_was_registered(name: str) -> None:
    op = opkit.custom_op(name, lambda x: x + 1, schema="(Tensor x) -> Tensor")

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return op(x)

    for kernel in (None, lambda x: x + 1):
        if kernel is not None:
            op.register_kernel("cpu", kernel)
        (target,) = [
            node.target
            for node in torch.export.export(Module(), (torch.ones(3),)).graph.nodes
            if node.op == "call_function"
        ]
        namespace, opname = name.split("::")
        assert target is op._opoverload
        assert target is getattr(getattr(torch.ops, namespace), opname).default
