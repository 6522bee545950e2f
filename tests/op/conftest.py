"""Fixtures of the operator tests."""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opkit

_count = itertools.count()


@pytest.fixture(
    params=[
        pytest.param(torch.library.custom_op, id="torch", marks=pytest.mark.exhaustive),  # runs nothing of opkit
        pytest.param(opkit.custom_op, id="opkit"),
    ]
)
def custom_op(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Both decorators: what a test asserts holds for torch's (since 2.13) and for opkit's."""
    if request.param is torch.library.custom_op and not hasattr(torch.Tag, "inplace"):
        pytest.skip("what these tests hold torch's own decorator to came with torch 2.13")
    return request.param


@pytest.fixture
def name() -> Iterator[str]:
    """A qualified operator name that no other test has; what opkit defines under it is removed afterwards."""
    name = f"drop_in::op{next(_count)}"
    yield name
    with contextlib.suppress(opkit.errors.UnknownOperatorError):
        opkit.remove(name)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Forget compiled programs afterwards, so that no test runs into the limit of recompilations."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(scope="session")
def bridge() -> None:
    """The bridge, with which plain calls of native kernels skip Python; several seconds unless the cache has it."""
    from opkit.op.native import compiled

    compiled.build_bridge()


@pytest.fixture(params=["bridge", pytest.param("python", marks=pytest.mark.exhaustive)])
def planned(request: pytest.FixtureRequest, settings: Callable[..., None]) -> None:
    """With the bridge, and as with ``OPKIT_BRIDGE=0``: every call is planned in Python."""
    if request.param == "bridge":
        request.getfixturevalue("bridge")
        return
    settings(bridge=0)


@pytest.fixture
def shifted(custom_op: Any, name: str) -> Any:
    """An operator of a tensor and a number whose body leaves torch."""

    @custom_op(name, mutates_args=())
    def shifted(x: Tensor, y: float) -> Tensor:
        return torch.from_numpy(x.cpu().numpy() + y).to(x.device)

    return shifted


@pytest.fixture
def sine(custom_op: Any, name: str) -> Any:
    """An operator of one tensor whose body leaves torch."""

    @custom_op(name, mutates_args=())
    def sine(x: Tensor) -> Tensor:
        return torch.from_numpy(np.sin(x.detach().cpu().numpy()))

    return sine


@pytest.fixture
def product(custom_op: Any, name: str) -> Any:
    """An operator of two tensors whose body stays in torch."""

    @custom_op(name, mutates_args=())
    def product(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    return product


# ---- two spellings of a call ----------------------------------------------------------------------------------------


@pytest.fixture(params=["object", "torch.ops"])
def spelling(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def spelled(spelling: str) -> Callable[[Any], Callable[..., Any]]:
    """An operator as it is called: the object, or what torch.ops has under its name at the time of the call."""

    def spelled(op: Any) -> Callable[..., Any]:
        if spelling == "object":
            return lambda *args: op(*args)
        namespace, opname = op.name.split("::")
        return lambda *args: getattr(getattr(torch.ops, namespace), opname)(*args)

    return spelled


# ---- one operator, without and with a kernel ------------------------------------------------------------------------


@pytest.fixture(scope="session")
def norm() -> Any:
    """An operator whose body stays in torch and has no kernel."""

    @opkit.custom_op("tnorm::norm")
    def norm(x: Float[Tensor, "*batch d"], weight: Float[Tensor, "d"], eps: float = 1e-6) -> Float[Tensor, "*batch d"]:
        """Root-mean-square normalisation."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    return norm


@pytest.fixture(scope="session")
def with_kernel(norm: Any) -> Callable[..., tuple[Any, list[tuple[int, ...]]]]:
    """Define ``norm`` again under another name, with a CPU kernel, and list the shapes of that kernel's calls."""

    def with_kernel(name: str, **options: Any) -> tuple[Any, list[tuple[int, ...]]]:
        op = opkit.custom_op(name, norm.reference, mutates_args=(), **options)
        calls = []

        @op.register_kernel("cpu")
        def numpy_norm(x, weight, eps=1e-6):
            calls.append(tuple(x.shape))
            scale = 1.0 / np.sqrt(np.square(x.numpy()).mean(-1, keepdims=True) + eps)
            return torch.from_numpy((x.numpy() * scale * weight.numpy()).astype(np.float32))

        return op, calls

    return with_kernel


@pytest.fixture(scope="session")
def norm_with_kernel(with_kernel: Any) -> tuple[Any, list[tuple[int, ...]]]:
    return with_kernel("tnorm::norm_kernel")


@pytest.fixture
def norm_kernel(norm_with_kernel: Any) -> Any:
    """``norm`` with a kernel."""
    return norm_with_kernel[0]


@pytest.fixture
def calls(norm_with_kernel: Any) -> list[tuple[int, ...]]:
    """The calls of ``norm_kernel``'s kernel during a test."""
    norm_with_kernel[1].clear()
    return norm_with_kernel[1]


@pytest.fixture(params=["reference", "kernel"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def op(kind: str, norm: Any, norm_kernel: Any) -> Any:
    """``norm``, without and with a kernel."""
    return norm_kernel if kind == "kernel" else norm


@pytest.fixture
def inputs() -> Callable[..., tuple[Tensor, Tensor]]:
    """Make arguments for ``norm``."""

    def inputs(train: bool = True) -> tuple[Tensor, Tensor]:
        return torch.randn(4, 8, requires_grad=train), torch.randn(8, requires_grad=train)

    return inputs


# ---- torch.compile --------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No compiled code, and no cached compilation, from an earlier test."""
    from torch._functorch import config as aot_config
    from torch._inductor import config as inductor_config

    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False), aot_config.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


class Recorder:
    """A backend that keeps the graphs which AOTAutograd makes, and runs them as they are."""

    def __init__(self) -> None:
        from torch._dynamo.backends.common import aot_autograd

        self.graphs = []
        self.backend = aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep)

    def _keep(self, module: Any, _: Any) -> Any:
        from torch._functorch.aot_autograd import make_boxed_func

        self.graphs.append(module)
        return make_boxed_func(module.forward)

    def targets(self) -> list[str]:
        return [str(node.target) for graph in self.graphs for node in graph.graph.nodes if node.op == "call_function"]

    def calls(self, op: Any) -> int:
        return sum(op.name.replace("::", ".") in target for target in self.targets())


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def among_neighbours() -> Callable[..., Any]:
    """``norm``, or a function that is called as it is, between operations that it can be fused with."""
    return lambda function: lambda x, weight: torch.relu(function(x + 1, weight)) * 2
