"""How ``opkit bench models`` judges a model: errors against float64, in this process, of models that need no package."""

import math

import pytest
import torch

from opkit.bench import accuracy, measurement, timing
from opkit.bench.architecture import Architecture, Task
from opkit.bench.measurement import Request, measure


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    """Judge, and take little time for timings."""
    monkeypatch.setattr(timing, "SECONDS", 0.0)


def replace_the_zoo(monkeypatch, module, inputs):
    """Have one model in the zoo, called probe."""
    probe = Architecture("probe", "decisions", lambda size: Task(module, inputs, batch=2))
    monkeypatch.setattr(measurement, "architectures", lambda: {"probe": probe})


def numbers(batch):
    return {"x": torch.randn(batch, 8)}


def test_eager_mode_is_a_backend():
    record = measure(Request("actor_critic", "eager"))
    assert record["status"] == "passed"
    assert record["errors"]["forward"] == pytest.approx(record["eager_errors"]["forward"])
    assert all(error <= record["eager_errors"][name] * (1 + 1e-6) for name, error in record["errors"].items())
    assert "cold" not in record["training"]


def test_autocast_is_judged_by_its_own_error():
    record = measure(Request("actor_critic", "eager", dtype="bfloat16"))
    assert record["status"] == "passed"
    assert record["eager_errors"]["forward"] > 1e-4


def test_float16_is_trained_with_a_gradient_scaler():
    record = measure(Request("actor_critic", "eager", dtype="float16"))
    assert record["status"] == "passed"
    assert 1 <= record["scale"] < 2**14  # with the scaler's first one, 2 ** 16, gradients overflow
    assert 0 < record["eager_errors"]["gradients"] < 1e-2


def test_a_model_without_float64_is_compared_with_float32_under_autocast(monkeypatch):
    class Model(torch.nn.Linear):
        def forward(self, x):
            if x.dtype == torch.float64:
                raise RuntimeError("no float64")
            return super().forward(x)

    replace_the_zoo(monkeypatch, Model(8, 4), numbers)
    wide, narrow = (measure(Request("probe", "eager", dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert (wide["status"], narrow["status"]) == ("passed", "passed")
    assert wide["reference"] == "eager mode: float64 raised RuntimeError: no float64"
    assert narrow["reference"] == "float32: float64 raised RuntimeError: no float64"
    assert narrow["eager_errors"]["forward"] > 1e-4


def test_results_whose_sizes_depend_on_rounding_are_not_judged_under_autocast(monkeypatch):
    class Model(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y[:, : 2 if y.dtype == torch.float64 and not self.training else 3]

    replace_the_zoo(monkeypatch, Model(8, 4), numbers)
    record = measure(Request("probe", "eager", dtype="bfloat16"))
    assert record["status"] == "passed"
    assert record["reference"] == "float64, in training alone: sizes of results depend on data"
    assert set(record["errors"]) == {"loss", "gradients", "steps"}
    assert record["eager_errors"]["gradients"] > 1e-4


@pytest.mark.parametrize("always", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_results_are_judged_with_other_inputs(always):
    """Results that are wrong with all inputs are found; a model that errs with one set of the inputs passes."""
    first = []

    def backend(module, inputs):
        def call(*args):
            data = [
                each for each in args if isinstance(each, torch.Tensor) and not isinstance(each, torch.nn.Parameter)
            ]
            if len(data) < len(args):  # the model, and no other graph
                first.append(data[0].clone())
            off = always or (bool(first) and torch.equal(first[0], data[0]))
            return tuple(each + 1e-3 * off for each in module(*args))

        return call

    torch._dynamo.register_backend(backend, name=f"off_by_one_{always}")
    record = measure(Request("actor_critic", f"off_by_one_{always}"))
    torch._dynamo.reset()
    assert record.get("inference_inputs") == 5
    assert record["status"] == ("wrong" if always else "passed"), record
    assert (record["errors"]["forward"] > 1e-4) == always


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is off by a thousandth where ``off`` is."""

    @staticmethod
    def forward(ctx, x, off):
        ctx.factor = 1.001 if off else 1.0
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


@pytest.mark.parametrize("always", [pytest.param(True, marks=pytest.mark.exhaustive), False])
def test_gradients_are_judged_with_other_inputs(always):
    """Gradients that are wrong with all inputs are found; a model whose gradients jump with the first ones alone passes."""
    first = []

    def backend(module, inputs):
        def call(*args):
            data = [each for each in args if not isinstance(each, torch.nn.Parameter)]
            if torch.is_grad_enabled() and len(data) < len(args) and not first:  # a step, and no other graph
                first.extend(data)
            off = always or all(each is before for each, before in zip(data, first, strict=False))
            return tuple(_Scaled.apply(each, off) if each.is_floating_point() else each for each in module(*args))

        return call

    torch._dynamo.register_backend(backend, name=f"scaled_gradients_{always}")
    record = measure(Request("actor_critic", f"scaled_gradients_{always}"))
    torch._dynamo.reset()
    assert record["training_inputs"] == 5
    assert record["status"] == ("wrong" if always else "passed"), record
    assert [line.split(":")[0] for line in record["wrong"]] == ["gradients", "steps"] * always
    assert (record["errors"]["gradients"] > 5e-4) == always


def test_runs_of_eager_mode_differ(monkeypatch):
    """Their errors bound those of a model: each of the perturbed runs begins with other parameters."""
    begins = set()

    class Model(torch.nn.Linear):
        def forward(self, x):
            if self.training and self.weight.dtype == torch.float32:
                begins.add(tuple(self.weight.flatten().tolist()))
            return super().forward(x)

    def inputs(batch):
        return {"x": torch.zeros(batch, 64)}  # the weights have no gradient, and do not change

    replace_the_zoo(monkeypatch, Model(64, 1), inputs)
    assert measure(Request("probe", "eager"))["status"] == "passed"
    assert len(begins) == 5


def test_errors():
    a = torch.tensor([3.0, 4.0])
    assert accuracy.worst_error([a, a], [a, a.double()]) == 0
    assert accuracy.worst_error([a * 1.01], [a]) == pytest.approx(0.01, rel=1e-4)
    assert accuracy.worst_error([a], [a, a]) == math.inf == accuracy.worst_error([a[:1]], [a])
    assert accuracy.joint_error([a, None], [a, None]) == 0
    assert accuracy.joint_error([a, None], [a, a]) == math.inf
    masked = torch.tensor([1.0, -math.inf])
    assert accuracy.worst_error([masked], [masked.double()]) == 0
    assert accuracy.wrong_results({"forward": 9e-6, "loss": 2e-4}, {"forward": 0.0, "loss": 3e-5}) == []
    assert accuracy.wrong_results({"loss": math.inf}, {"loss": math.inf})
    runs = [{"loss": 3.0}, {"loss": math.nan}, {"loss": 1.0}]
    assert accuracy.medians(runs) == {"loss": 3.0}
    assert accuracy.medians(runs[:2]) == {"loss": math.inf}
    assert len(accuracy.wrong_results({"forward": 2e-5, "loss": math.nan}, {"forward": 1e-7, "loss": 1e-7})) == 2
