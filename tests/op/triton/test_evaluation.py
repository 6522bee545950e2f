"""Functions of named values: their order, the cache of their results, their errors, and which names they may use."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from jaxtyping import Shaped
from torch import Tensor

import opkit
from opkit.errors import DeclarationError, KernelError
from opkit.op.triton.evaluation import TensorInfo, as_grid, evaluate, formula, ordered


def names(*functions):
    return [f.name for f in ordered([formula(name, function) for name, function in functions])]


def test_each_comes_after_those_that_it_asks_for():
    assert names(("grid", lambda BLOCK: BLOCK), ("BLOCK", lambda d, ROWS: d), ("ROWS", lambda d: d)) == [
        "ROWS",
        "BLOCK",
        "grid",
    ]


def test_what_asks_for_everything_comes_last():
    assert names(("grid", lambda meta: 1), ("late", lambda BLOCK: 1), ("BLOCK", lambda d: d)) == [
        "BLOCK",
        "late",
        "grid",
    ]
    assert names(("grid", lambda EVEN: 1), ("EVEN", lambda META: 1), ("BLOCK", lambda d: d)) == [
        "BLOCK",
        "EVEN",
        "grid",
    ]


def test_circles_are_refused():
    with pytest.raises(DeclarationError, match="the functions for a, b take each other's values"):
        names(("a", lambda b: b), ("b", lambda a: a))


def test_defaults_serve_where_a_name_means_nothing():
    assert formula("grid", lambda d, step=4: d // step, lambda name: name == "d").inputs == ("d",)
    assert formula("grid", lambda d, step=4: d // step, lambda name: True).inputs == ("d", "step")


def test_a_result_is_kept_for_its_values():
    asked = []

    def block(d):
        asked.append(d)
        return d * 2

    made = ordered([formula("BLOCK", block)])
    for d in (1, 2, 1, 2, 1):
        assert evaluate("t::f", made, {"d": d, "other": len(asked)})["BLOCK"] == 2 * d
    assert asked == [1, 2]


def test_what_has_no_hash_is_evaluated_each_time():
    made = ordered([formula("BLOCK", lambda sizes: len(sizes))])
    assert evaluate("t::f", made, {"sizes": [1, 2]})["BLOCK"] == 2


def test_a_type_error_of_the_author_is_no_reason_to_call_again():
    calls = []

    def block(d):
        calls.append(d)
        raise TypeError("mine")

    with pytest.raises(KernelError, match="TypeError: mine"):
        evaluate("t::f", [formula("BLOCK", block)], {"d": 3})
    assert calls == [3]


def test_a_key_error_of_the_author_is_the_authors():
    with pytest.raises(KernelError, match=r"the function for grid .* failed on no values: KeyError: 'ROWS'"):
        evaluate("t::f", [formula("grid", lambda meta: meta["ROWS"])], {"d": 3})


def test_a_failure_says_who_where_and_on_what():
    x = TensorInfo("float32", (2, 3), (3, 1))
    message = (
        r"t::f, kernel 'k': the function for grid \(.*test_evaluation.py:\d+\) failed on x=TensorInfo\(dtype='float32', "
        r"shape=\(2, 3\), strides=\(3, 1\)\), d=0: ZeroDivisionError"
    )
    with pytest.raises(KernelError, match=message) as caught:
        evaluate("t::f, kernel 'k'", [formula("grid", lambda x, d: x.numel // d)], {"x": x, "d": 0})
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_functions_that_are_not_pythons_have_no_line():
    with pytest.raises(KernelError, match="the function for n failed on x='a': ValueError"):
        evaluate("t::f", [formula("n", _Parsed())], {"x": "a"})


class _Parsed:
    def __call__(self, x):
        return int(x)


def test_grids():
    given = (3, (3,), [3, 4], (3, 4, 5), 0)
    assert [as_grid("t::f", each) for each in given] == [(3, 1, 1), (3, 1, 1), (3, 4, 1), (3, 4, 5), (0, 1, 1)]


def like(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def biased(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return x * 2


@triton.jit
def _copy(x_ptr, output_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    at = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    tl.store(output_ptr + at, tl.load(x_ptr + at, mask=at < n_elements), mask=at < n_elements)


_BOUND = {"n_elements": "x_numel", "output_ptr": "out"}


@pytest.fixture
def grid_of(on_cpu, op):
    """The grid of a launch for 5000 elements."""

    def run(**options):
        made = op(like)
        made.register_kernel("cpu", opkit.triton_kernel(_copy, **{"bind": _BOUND, "BLOCK_SIZE": 1024, **options}))
        made(torch.ones(5000))
        return on_cpu.launches[0].grid

    return run


def test_meta_has_parameters_by_their_own_names(grid_of):
    assert grid_of(grid=lambda META: (triton.cdiv(META["n_elements"], META["BLOCK_SIZE"]),)) == (5, 1, 1)


def test_defaults_of_functions(grid_of):
    size = 1000
    assert grid_of(grid=lambda n_elements, size=size: n_elements // size) == (5, 1, 1)


def test_parameters_by_keyword_alone(grid_of):
    assert grid_of(grid=lambda *, BLOCK_SIZE, n_elements: triton.cdiv(n_elements, BLOCK_SIZE)) == (5, 1, 1)


@triton.heuristics(
    {"HAS_BIAS": lambda args: args["bias_ptr"] is not None, "EVEN": lambda args: args["N"] % args["BLOCK"] == 0}
)
@triton.jit
def _heuristic(x_ptr, bias_ptr, out_ptr, stride_xm, N, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    pass


def test_heuristics_see_parameters_by_their_own_names(on_cpu, op):
    made = op(biased)
    bound = {"N": "x_size_1", "stride_xm": "x_stride_0"}
    made.register_kernel(
        "cpu", opkit.triton_kernel(_heuristic, grid=lambda meta: meta["N"] // 4, bind=bound, BLOCK=128)
    )
    made(torch.ones(4, 256))
    made(torch.ones(4, 255), torch.ones(3))
    found = [launch.request.constexprs for launch in on_cpu.launches]
    assert [(each["HAS_BIAS"], each["EVEN"]) for each in found] == [(False, True), (True, False)]


def _pruned(configs, named_args, **kwargs):
    return [
        config for config in configs if config.kwargs["BLOCK_SIZE"] < kwargs["n_elements"] == named_args["n_elements"]
    ]


@pytest.mark.parametrize(
    "prune", [_pruned, lambda configs, n_elements: [c for c in configs if c["BLOCK_SIZE"] < n_elements]]
)
def test_prune_sees_parameters_by_their_own_names(on_cpu, op, prune):
    configs = [triton.Config({"BLOCK_SIZE": 8192}), triton.Config({"BLOCK_SIZE": 2500})]
    tuned = triton.autotune(configs, key=["n_elements"], prune_configs_by={"early_config_prune": prune})(_copy)
    made = op(like)
    made.register_kernel("cpu", opkit.triton_kernel(tuned, grid=lambda BLOCK_SIZE: BLOCK_SIZE, bind=_BOUND))
    made(torch.ones(5000))
    assert {launch.grid for launch in on_cpu.launches} == {(2500, 1, 1)}


def test_what_is_reset_is_named_as_parameter_or_tensor(on_cpu, op):
    made = op(like)
    for name in ("output_ptr", "out"):
        made.register_kernel(
            "cpu", opkit.triton_kernel(_copy, grid=1, bind=_BOUND, BLOCK_SIZE=64, reset_to_zero=(name,))
        )
        made(torch.ones(5))
    assert len(on_cpu.fake.noted("fill")) == 2
    with pytest.raises(DeclarationError, match="reset_to_zero names 'outpt'; the tensors are x, out"):
        made.register_kernel(
            "cpu", opkit.triton_kernel(_copy, grid=1, bind=_BOUND, BLOCK_SIZE=64, reset_to_zero=("outpt",))
        )


def test_configs_and_values_do_not_contradict_each_other():
    with pytest.raises(
        DeclarationError, match="BLOCK_SIZE has a value, and the config BLOCK_SIZE=128 gives it another"
    ):
        opkit.triton_kernel(_copy, grid=1, bind=_BOUND, BLOCK_SIZE=64, configs=[{"BLOCK_SIZE": 128}])


@triton.jit
def _two(x, out, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr = 5):
    pass


def test_configs_say_all_that_has_no_default(on_cpu, op):
    made = op(like)
    with pytest.raises(DeclarationError, match="the config A=256 has no value for B, as others do"):
        made.register_kernel("cpu", opkit.triton_kernel(_two, grid=1, configs=[{"A": 128, "B": 3}, {"A": 256}]))
    made.register_kernel("cpu", opkit.triton_kernel(_two, grid=1, B=1, configs=[{"A": 128, "C": 3}, {"A": 256}]))
    made(torch.ones(3))
    assert {request.constexprs["C"] for request in on_cpu.requests} == {3, 5}


def test_a_grid_that_no_gpu_takes(on_cpu, op):
    made = op(like)
    made.register_kernel("cpu", opkit.triton_kernel(_copy, grid=lambda x: 2**31 + x.numel, bind=_BOUND, BLOCK_SIZE=64))
    with pytest.raises(RuntimeError, match=r"Along x there can be 2147483647 programs; use y and z too"):
        made(torch.ones(5))


def test_a_post_hook_is_refused():
    tuned = triton.autotune([triton.Config({"BLOCK_SIZE": 64})], key=[], post_hook=lambda args, exception: None)(_copy)
    with pytest.raises(
        DeclarationError, match=r"_copy: triton\.autotune was given a post_hook, which opkit does not call"
    ):
        opkit.triton_kernel(tuned, grid=1, bind=_BOUND)


def sized(x: Shaped[Tensor, "n"], weight: Shaped[Tensor, "k"] | None = None) -> Tensor:
    return torch.empty_like(x)


@triton.jit
def _sized(x, out, weight, k):
    pass


def test_a_size_that_no_tensor_tells_is_0(on_cpu, op):
    made = op(sized)
    made.register_kernel("cpu", opkit.triton_kernel(_sized, grid=1))
    for weight, k in ((None, 0), (torch.ones(3), 3)):
        made(torch.ones(5), weight)
        assert on_cpu.launches[-1].values["k"] == k
