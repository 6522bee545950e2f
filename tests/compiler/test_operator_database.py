"""Operators of PyTorch's OpInfo database, compiled, give what eager gives; all of them: benchmarks/opinfo_compile.py."""

import functools
import warnings

import pytest
import torch
from database_compiled import asked, infos

EXCEPTIONS: dict[str, str] = {}
"""Operators that opkit does not compile as eager mode computes them, by name, with the reason; one that passes is reported."""

# Of each kind of operator one: pointwise, reduced, a scan, moved, indexed, a product, of a library, of several results.
SAMPLE = (
    "cat", "cumsum", "frexp", "gather", "index_put", "nn.functional.conv2d", "nn.functional.layer_norm",
)  # fmt: skip
FURTHER = (
    "amax", "fft.rfft", "max.reduction_with_dim", "nn.functional.cross_entropy", "sort",
    "add", "argmax", "clamp", "div.floor_rounding", "linalg.vector_norm", "masked_fill", "nn.functional.interpolate.bilinear",
    "nn.functional.max_pool2d", "unfold", "var_mean",
    "abs", "addmm", "all", "any", "atan2", "baddbmm", "bitwise_and", "bmm", "copysign", "cumprod", "diag_embed", "erf",
    "expand", "flip", "floor_divide", "fmod", "index_add", "index_select", "isclose", "lgamma", "lerp", "log1p",
    "logcumsumexp", "logsumexp", "nan_to_num", "nn.functional.avg_pool2d", "nn.functional.batch_norm",
    "nn.functional.embedding", "nn.functional.gelu", "nn.functional.group_norm", "nn.functional.pad.reflect",
    "nn.functional.softplus", "pow", "prod", "remainder", "roll", "scatter_add", "softmax", "split", "std", "topk", "tril",
    "where",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch._dynamo.reset()


@pytest.fixture
def strict():
    """opkit's backend, which fails where it would otherwise run a graph eagerly."""
    backend = pytest.importorskip("opkit.compiler.backend", reason="opkit's backend cannot be imported")
    return functools.partial(backend.opkit_backend, options={"strict": True})


def found(name, dtype, backend, limit=1):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return asked(name, dtype, backend, limit)


@pytest.mark.parametrize("name", [*SAMPLE, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in FURTHER)])
def test_an_operator_is_as_in_eager(name, strict):
    result = found(
        name, torch.float32 if torch.float32 in infos()[name].supported_dtypes("cpu") else torch.int64, strict
    )
    if name in EXCEPTIONS:
        assert result.outcome != "pass", f"{name} passes now: take it from the list"
    else:
        assert result.outcome == "pass", result.message
        assert result.samples


def test_exceptions_are_of_the_database_and_have_reasons():
    assert set(EXCEPTIONS) <= set(infos())
    assert all(EXCEPTIONS.values())


def _doubling(module, inputs):
    return lambda *args: tuple(out * 2 if isinstance(out, torch.Tensor) else out for out in module(*args))


def _dying(module, inputs):
    raise ZeroDivisionError("no kernel")


@pytest.mark.parametrize(
    ("backend", "outcome", "message"),
    [("eager", "pass", ""), (_doubling, "wrong", "not close"), (_dying, "error", "no kernel")],
    ids=["right", "wrong", "dying"],
)
def test_the_harness_tells_right_from_wrong(backend, outcome, message):
    result = found("sin", torch.float32, backend)
    assert result.outcome == outcome
    assert message in result.message
    assert (result.samples, result.gradients) == (1, 1)
