"""Operators on DTensors: placements and communication, on a fake process group."""

import functools
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils import _pytree as pytree

import opkit
from opkit.errors import RuleError

R = Replicate()


def placed(mesh, shape, *placements):
    """Return a DTensor of a global shape with random numbers."""
    local = list(shape)
    for i, placement in enumerate(placements):
        if isinstance(placement, Shard):
            local[placement.dim] = -(-local[placement.dim] // mesh.size(i))
    return DTensor.from_local(
        torch.rand(local), mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides(shape)
    )


def strides(shape):
    return torch.empty(shape, device="meta").stride()


def outcome(function, *args):
    """Return the placements of the results, and the collectives that ran."""
    counted = CommDebugMode()
    with counted:
        results = function(*args)
    found = [t.placements if len(t.placements) > 1 else t.placements[0] for t in pytree.tree_leaves(results)]
    return found, {str(op).split(".")[-1]: n for op, n in counted.get_comm_counts().items()}


@pytest.fixture
def rms_norm(name):
    @opkit.custom_op(name, mutates_args=())
    def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    return rms_norm


@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_batch_may_be_sharded(mesh, rms_norm, context):
    with context():
        assert outcome(rms_norm, placed(mesh, (8, 6), Shard(0)), placed(mesh, (6,), R)) == ([Shard(0)], {})


def test_uneven_shards_stay_where_they_are(mesh, rms_norm):
    for rows in (9, 3):
        assert outcome(rms_norm, placed(mesh, (rows, 6), Shard(0)), placed(mesh, (6,), R)) == ([Shard(0)], {})


def test_what_is_reduced_is_gathered(mesh, rms_norm):
    found, counts = outcome(rms_norm, placed(mesh, (8, 8), Shard(1)), placed(mesh, (8,), Shard(0)))
    assert found == [R]
    assert counts == {"all_gather_into_tensor": 2}


def test_strategies_of_all_mesh_dimensions_combine(grid, rms_norm):
    weight = placed(grid, (6,), R, R)
    for placements in [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Shard(0)), (Shard(0), R)]:
        x = placed(grid, (16, 16, 6), *placements)
        assert outcome(rms_norm, x, weight) == ([placements], {})


def test_a_product_of_matrices(grid, name):
    @opkit.custom_op(name, mutates_args=())
    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, weight)

    x, weight = placed(grid, (4, 8), Shard(0), Shard(1)), placed(grid, (12, 8), R, Shard(1))
    assert outcome(linear, x, weight) == ([(Shard(0), Partial())], {})
    x, weight = placed(grid, (4, 8), Shard(0), R), placed(grid, (12, 8), R, Shard(0))
    assert outcome(linear, x, weight) == ([(Shard(0), Shard(1))], {})
    x, weight = placed(grid, (4, 8), Shard(0), Partial()), placed(grid, (12, 8), R, R)
    assert outcome(linear, x, weight) == ([(Shard(0), Partial())], {})


def test_reductions_of_even_and_uneven_pieces(mesh, name):
    @opkit.custom_op(name, mutates_args=())
    def reductions(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.amax(0), x.sum(0)

    assert outcome(reductions, placed(mesh, (8, 3), Shard(0)))[0] == [Partial("max"), Partial()]
    assert outcome(reductions, placed(mesh, (11, 3), Shard(0)))[0] == [Partial("max"), Partial()]
    assert outcome(reductions, placed(mesh, (9, 3), Shard(0)))[0] == [R, R]  # a device would have no row


def test_a_mean_needs_even_pieces(mesh, name):
    @opkit.custom_op(name, mutates_args=())
    def mean(x: Tensor) -> Tensor:
        return x.mean(0)

    assert outcome(mean, placed(mesh, (8, 3), Shard(0))) == ([Partial("avg")], {})
    assert outcome(mean, placed(mesh, (9, 3), Shard(0))) == ([R], {"all_gather_into_tensor": 1})


def test_writes_reach_the_pieces(mesh, name):
    @opkit.custom_op(name, mutates_args=("x",))
    def scale(x: Tensor, factor: Tensor) -> None:
        x.mul_(factor)

    x, factor = placed(mesh, (8, 6), Shard(0)), placed(mesh, (6,), R)
    wanted = x.to_local() * factor.to_local()
    scale(x, factor)
    assert torch.equal(x.to_local(), wanted)
    with pytest.raises(RuntimeError, match=r"no sharding strategy fits .*Partial.* The tensors 0 are written to"):
        scale(placed(mesh, (8, 6), Partial("max")), factor)


def test_lists_optional_arguments_and_several_results(mesh, name):
    @opkit.custom_op(name, mutates_args=())
    def mixed(xs: list[Tensor], weight: Tensor | None = None, *, factor: float = 1.0) -> list[Tensor]:
        return [x * factor if weight is None else x * weight for x in xs]

    xs = [placed(mesh, (8, 4), Shard(1)), placed(mesh, (3, 4), Shard(1))]
    assert outcome(mixed, xs, placed(mesh, (4,), Shard(0))) == ([Shard(1), Shard(1)], {})
    assert outcome(mixed, xs[:1], None) == ([Shard(1)], {})
    assert outcome(functools.partial(mixed, factor=2.0), xs) == ([Shard(1), Shard(1)], {})


def test_other_arguments_are_part_of_the_rule(mesh, name):
    @opkit.custom_op(name, mutates_args=())
    def total(x: Tensor, dim: int, scale: float) -> Tensor:
        return x.sum(dim) * scale if scale else x.cumsum(dim)

    x = placed(mesh, (8, 4), Shard(0))
    assert outcome(total, x, 0, 2.0)[0] == [Partial()]
    assert outcome(total, x, 1, 2.0)[0] == [Shard(0)]
    assert outcome(total, x, 0, 0.0) == ([R], {"all_gather_into_tensor": 1})


def test_operators_without_a_rule(mesh, name):
    @opkit.custom_op(name, mutates_args=())
    def noise(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    with pytest.raises(NotImplementedError, match=f"{name} does not have a sharding strategy: .*draws random numbers"):
        noise(placed(mesh, (8, 4), Shard(0)))


def test_an_opaque_operator_runs_on_copies(mesh, name):
    @opkit.custom_op(name, mutates_args=(), opaque=True)
    def opaque(x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() * 2)

    opaque.register_fake(torch.empty_like)
    assert outcome(opaque, placed(mesh, (8, 4), Shard(0))) == ([R], {"all_gather_into_tensor": 1})


def test_kernels_run_on_the_pieces(mesh, rms_norm):
    seen = []

    @rms_norm.register_kernel("cpu")
    def _(x, weight, eps):
        seen.append((type(x), tuple(x.shape), eps))
        return rms_norm.reference(x, weight, eps)

    rms_norm(placed(mesh, (8, 6), Shard(0)), placed(mesh, (6,), R))
    assert (torch.Tensor, (2, 6), 1e-6) in seen


def test_a_redefined_operator_has_a_rule_of_its_own(mesh, name):
    for reference, wanted in ((lambda x: x.sum(0), Partial()), (lambda x: x.cumsum(0).sum(0), R)):

        def op(x: Tensor) -> Tensor:
            return reference(x)  # noqa: B023

        defined = opkit.custom_op(name, op, mutates_args=())
        assert outcome(defined, placed(mesh, (8, 4), Shard(0)))[0] == [wanted]
        opkit.remove(name)


def test_large_meshes(fake_group, rms_norm):
    mesh = torch.distributed.device_mesh.DeviceMesh("cpu", torch.arange(512).reshape(8, 8, 8))
    x, weight = placed(mesh, (64, 16, 6), Shard(0), Shard(1), Shard(0)), placed(mesh, (6,), R, R, R)
    assert outcome(rms_norm, x, weight) == ([(Shard(0), Shard(1), Shard(0))], {})


PROGRAM = """
import sys, torch, opkit
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2
before = opkit.custom_op("sharded::before", double, mutates_args=())
assert "torch.distributed.tensor" not in sys.modules
{activity}
import torch.distributed.tensor
after = opkit.custom_op("sharded::after", double, mutates_args=())
from torch.distributed.tensor import DTensor
known = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
assert torch.ops.sharded.before.default in known and torch.ops.sharded.after.default in known
"""


@pytest.mark.parametrize("activity", ["", "torch.ops.sharded.before(torch.ones(2))", "import torch.distributed.fsdp"])
def test_operators_are_registered_when_dtensor_is_imported(activity):
    run = subprocess.run([sys.executable, "-c", PROGRAM.format(activity=activity)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("kernel", [False, True])
def test_compiled_programs(mesh, rms_norm, kernel):
    if kernel:
        rms_norm.register_kernel("cpu", lambda x, weight, eps: rms_norm.reference(x, weight, eps))
    x, weight = placed(mesh, (8, 6), Shard(0)), placed(mesh, (6,), R)
    compiled = torch.compile(lambda x, weight: rms_norm(x, weight) + 1, backend="aot_eager", fullgraph=True)
    got = compiled(x, weight)
    assert got.placements == (Shard(0),)
    torch.testing.assert_close(got.to_local(), rms_norm.reference(x.to_local(), weight.to_local()) + 1)


def test_registered_strategies_take_the_place_of_derived_ones(mesh, rms_norm):
    x, weight = placed(mesh, (8, 6), Shard(0)), placed(mesh, (6,), R)
    assert outcome(rms_norm, x, weight)[0] == [Shard(0)]

    @rms_norm.register_sharding
    def _(x, weight, eps):
        assert (x.ndim, eps) == (2, 1e-6)
        return [([Shard(1)], [Shard(1), Shard(-1), None])]

    assert outcome(rms_norm, x, weight) == ([R], {"all_gather_into_tensor": 1})
    assert outcome(rms_norm, placed(mesh, (8, 8), Shard(1)), placed(mesh, (8,), Shard(0))) == ([Shard(1)], {})


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "returned None"),
        ([Shard(0)], r"returned \[Shard"),
        ([([Shard(0)], [Shard(0)])], "returned 1 input placements, and the call has 2 tensors: x, weight"),
        ([([Shard(0), R], [Shard(0), R])], "returned 2 output placements, and the operator has 1 results"),
        ([([Shard(0)], [Shard(2), R])], r"has Shard\(dim=2\) for the argument x; expected a dimension of its 2"),
        (
            [([Shard(0)], [Shard(0), "R"])],
            "has 'R' for the argument weight; placements are Shard, Replicate and Partial",
        ),
        ([([Shard(-1)], [Shard(0), R])], r"for the result 0; expected a dimension that is not negative"),
    ],
)
def test_wrong_registrations_name_the_argument(mesh, rms_norm, returned, message):
    rms_norm.register_sharding(lambda x, weight, eps: returned)
    with pytest.raises(
        RuntimeError, match=f"{rms_norm.name}: the function given to register_sharding .*{message}"
    ) as caught:
        rms_norm(placed(mesh, (8, 6), Shard(0)), placed(mesh, (6,), R))
    assert isinstance(caught.value.__cause__, RuleError)
