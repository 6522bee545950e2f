"""Operators of PyTorch's OpInfo database, compiled, give what eager gives; all of them: benchmarks/opinfo_compile.py."""

import dataclasses
import functools
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import database_compiled
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
    "expand", "flip", "floor_divide", "fmod", "histc", "index_add", "index_select", "isclose", "lgamma", "lerp", "log1p",
    "logcumsumexp", "logsumexp", "nan_to_num", "nn.functional.avg_pool2d", "nn.functional.batch_norm",
    "nn.functional.embedding", "nn.functional.gelu", "nn.functional.group_norm", "nn.functional.pad.reflect",
    "nn.functional.softplus", "pow", "prod", "remainder", "roll", "scatter_add", "softmax", "split", "std", "topk", "tril",
    "where",
)  # fmt: skip
CASES = [
    *(pytest.param(name, "cpu", id=name) for name in SAMPLE),
    *(pytest.param(name, "cpu", id=name, marks=pytest.mark.exhaustive) for name in FURTHER),
    *(pytest.param(name, "cuda", id=f"{name}-cuda", marks=pytest.mark.gpu) for name in (*SAMPLE, *FURTHER)[:20]),
]


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


def found(name, dtype, backend, device="cpu"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return asked(name, dtype, backend, 1, device)


@pytest.mark.parametrize(("name", "device"), CASES)
def test_an_operator_is_as_in_eager(name, device, strict):
    takes_floats = torch.float32 in infos()[name].supported_dtypes(device)
    result = found(name, torch.float32 if takes_floats else torch.int64, strict, device)
    if name in EXCEPTIONS:
        assert result.outcome != "pass", f"{name} passes now: take it from the list"
    else:
        assert result.outcome == "pass", result.message
        assert result.samples


def test_batch_norm_of_narrow_floats(strict):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = asked("_native_batch_norm_legit", torch.bfloat16, strict, 2)  # the second sample is in evaluation
    assert (result.outcome, result.gradients) == ("pass", 2), result.message


def test_exceptions_are_of_the_database_and_have_reasons():
    assert set(EXCEPTIONS) <= set(infos())
    assert all(EXCEPTIONS.values())


def _doubling(module, inputs):
    return lambda *args: tuple(out * 2 if isinstance(out, torch.Tensor) else out for out in module(*args))


def _dying(module, inputs):
    raise ZeroDivisionError("no kernel")


def _refusing(module, inputs):
    from opkit.errors import CompileError

    raise CompileError("torch.compile(backend='opkit') cannot compile forward_0: it is sparse.")


@pytest.mark.parametrize(
    ("backend", "outcome", "message"),
    [
        ("eager", "pass", ""),
        (_doubling, "wrong", "not close"),
        (_dying, "error", "no kernel"),
        (_refusing, "fallback", "it is sparse."),
    ],
    ids=["right", "wrong", "dying", "refusing"],
)
def test_the_harness_tells_right_from_wrong(backend, outcome, message):
    result = found("sin", torch.float32, backend)
    assert result.outcome == outcome
    assert message in result.message
    assert (result.samples, result.gradients) == (1, 1)


def _exact(module, inputs):
    return lambda *args: [module(*(x.double() for x in args))[0].to(torch.bfloat16)]


@pytest.mark.parametrize(("backend", "outcome"), [(_exact, "pass"), (_doubling, "wrong")], ids=["exact", "wrong"])
def test_a_result_may_be_nearer_to_float64_than_eager(backend, outcome, monkeypatch):
    def rough(x):  # as eager kernels that accumulate in a narrow dtype
        return x.sum() if x.dtype == torch.float64 or torch.compiler.is_compiling() else x.sum() * 1.25

    rough_info = Info(rough)
    monkeypatch.setattr(database_compiled, "infos", lambda: {"rough": rough_info})
    assert asked("rough", torch.bfloat16, backend, 1).outcome == outcome


@dataclasses.dataclass
class Info:
    """An operator of one argument, as the database has them."""

    op: Callable[..., Any]
    supports_autograd: bool = False

    def supported_dtypes(self, device):
        return {torch.bfloat16}

    def sample_inputs(self, device, dtype, requires_grad):
        return [SimpleNamespace(input=torch.ones(40, dtype=dtype, device=device), args=(), kwargs={})]


WORKERS = """
import functools, os, signal, sys, time
sys.path.insert(0, sys.argv[1])
import workers

def call(item, report):
    if item == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if item == "hang":
        time.sleep(600)
    if item == "raise":
        raise ValueError("bad")
    report(item)
    if item == "lose":
        raise workers.LostDeviceError

if __name__ == "__main__":
    workers._START_SECONDS = 60
    items = ["crash", "raise", "lose", "a", "b", "hang"]
    for item, said, how in workers.run(call, items, "cpu", jobs=2, case_seconds=1):
        print(item, said, how.strip().rpartition(chr(10))[2])
    print(sum(1 for _ in workers.run(call, iter(str, None), "cpu", seconds=0)))
"""


@pytest.mark.exhaustive
def test_processes_that_crash_hang_or_lose_the_device_are_replaced(tmp_path):
    (tmp_path / "script.py").write_text(WORKERS)
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    command = [sys.executable, tmp_path / "script.py", benchmarks]
    *lines, last = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert sorted(lines) == [
        "a a ", "b b ", "crash None exit code -11", "hang None time", "lose lose ", "raise None ValueError: bad",
    ]  # fmt: skip
    assert last == "0"
