"""behaviour: global state that is changed or relied on, threads, streams, and a second device."""

import os
import warnings

import numpy as np
import pytest
import torch

from opkit.testing import tensor

N = (tensor("n"),)


def _seeds(x):
    torch.manual_seed(0)
    return x + torch.rand(x.shape)


CHANGES = {
    "threads": lambda x: torch.set_num_threads(3),
    "default dtype": lambda x: torch.set_default_dtype(torch.float64),
    "grad mode": lambda x: torch.set_grad_enabled(False),
    "deterministic": lambda x: torch.use_deterministic_algorithms(True),
    "denormals": lambda x: torch.set_flush_denormal(True),
    "matmul precision": lambda x: torch.set_float32_matmul_precision("high"),
    "numpy": lambda x: np.random.rand(),  # noqa: NPY002
    "seed": lambda x: torch.manual_seed(1234),
    "environment": lambda x: os.environ.__setitem__(
        "OPKIT_TEST_COUNT", str(int(os.environ.get("OPKIT_TEST_COUNT", 0)) + 1)
    ),
    "filters": lambda x: warnings.filterwarnings("ignore", message=f"number {len(warnings.filters)}"),
    "numpy seed": lambda x: np.random.seed(0),  # noqa: NPY002
    "generator": lambda x: torch.rand(1),
}


@pytest.mark.sweep(10)
@pytest.mark.parametrize("name", CHANGES)
def test_changed_state_is_found_and_put_back(name, asked):
    def op(x):
        CHANGES[name](x)
        return x.clone()

    before = (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), list(warnings.filters))
    report = asked("behaviour.global_state", op, args=N)
    os.environ.pop("OPKIT_TEST_COUNT", None)
    assert [failure.property for failure in report.failures] == ["behaviour.global_state"], str(report)
    assert before == (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        list(warnings.filters),
    )
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_seed_that_is_set_inside_is_found(fails):
    fails("behaviour.global_state", _seeds, args=N)


RELIES = {
    "default dtype": lambda x: torch.zeros(x.shape) + x,
    "grad mode": lambda x: x.clone() if torch.is_grad_enabled() else torch.zeros_like(x),
    "deterministic": lambda x: x + 1 if torch.are_deterministic_algorithms_enabled() else x.clone(),
}


@pytest.mark.parametrize("name", RELIES)
def test_state_that_results_rely_on_is_found(name, fails):
    fails("behaviour.settings", RELIES[name], args=N)


def test_the_default_device_is_a_remark(holds):
    def op(x):
        return x + torch.zeros(x.shape, dtype=x.dtype)

    assert holds("behaviour.settings", op, args=N).remarks


def test_integers_may_follow_the_default_dtype(holds):
    holds("behaviour.settings", torch.true_divide, args=(tensor("n", torch.int64), tensor("n", torch.int64, low=1)))


def test_work_that_is_dropped_where_threads_do_not_divide_is_found(fails):
    def op(x):
        part = x.numel() // torch.get_num_threads() * torch.get_num_threads()
        out = torch.zeros_like(x)
        out[:part] = x[:part]
        return out

    failure = fails("behaviour.threads", op, args=N)
    assert failure.args[0].numel() <= 3


def test_sums_in_another_order_hold(holds):
    holds(
        "behaviour.threads",
        lambda x: torch.stack([part.sum() for part in x.chunk(torch.get_num_threads())]).sum(),
        args=N,
    )


def test_a_global_buffer_is_found_by_threads(fails):
    buffer = torch.empty(2**16)

    def op(x):
        n = x.numel()
        buffer[:n] = x
        buffer[:n].mul_(2)
        return buffer[:n].clone()

    failure = fails("behaviour.concurrent", op, args=(tensor((1000,)),))
    assert "threads called at once" in failure.message


def test_a_global_workspace_of_numpy_is_found_by_threads(fails):
    state = {}

    def op(x):
        state["x"] = x.numpy()
        total = 0.0
        for _ in range(20):
            total = total + np.sum(state["x"])
        return torch.tensor(float(total))

    fails("behaviour.concurrent", op, args=(tensor((1000,), low=0, high=1),))


def test_right_operators_hold_in_threads(holds):
    for op, args in ((torch.softmax, (tensor("b n"), -1)), (torch.matmul, (tensor("a b"), tensor("b c")))):
        holds("behaviour.concurrent", op, args=args, max_examples=10)
        holds("behaviour.threads", op, args=args, max_examples=10)


def test_streams_are_asked_on_gpus_alone(asked):
    for name in ("behaviour.streams", "behaviour.second_device"):
        assert "cpu" in asked(name, torch.neg, args=N).skipped[0].reason


@pytest.mark.gpu
def test_a_right_operator_holds_on_streams(holds):
    holds("behaviour.streams", torch.neg, args=N, device="cuda")


@pytest.mark.gpu
def test_a_launch_on_the_default_stream_is_found(fails):
    def op(x):
        with torch.cuda.stream(torch.cuda.default_stream()):
            return x * 2

    fails("behaviour.streams", op, args=(tensor("n", low=1, high=2),), device="cuda")


@pytest.mark.gpu
def test_results_on_the_current_device_are_found(fails):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    fails("behaviour.second_device", lambda x: x.to("cuda"), args=N, device="cuda")
