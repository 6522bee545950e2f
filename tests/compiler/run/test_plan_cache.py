"""Plans on the disk: what comes back is what was put there, and nothing that was changed meanwhile."""

import json

import pytest
import torch

from opkit.compiler.ir.graph import OpaqueValue, TypeName
from opkit.compiler.ir.index import size, value
from opkit.compiler.ir.program import Buffer, Extern, Strided
from opkit.compiler.run import plan_cache
from opkit.compiler.run.plan import ExecutionPlan, GraphConstants, Segment, constants_from_json, constants_to_json

pytestmark = pytest.mark.usefixtures("cache")
n = size("s0", 2)
PLAN = ExecutionPlan(
    "forward 0",
    ("x", n),
    {"x": Buffer("x", "f32", (n * 4, n // 3), (n % 5 + 1, n * 0 + 1), "input")},
    (
        Segment(0, ("x",), ("aten.add.Tensor model.py:1: x + 1",)),
        Extern("aten.mm.default", (Strided("x", (n,), (n,), n), 1.5, float("inf"), 2j, None), {"dtype": TypeName("f32")},
               ("x", None, n), frozenset({"x"}), out=True),
        Extern("opaque", ([OpaqueValue("cpu"), True], {"a": (1,)}), {}, ()),
    ),
    (n, None, 3),
    {"x": n * 64},
    n * 128,
    ("x",),
    ("s0",),
)  # fmt: skip


def test_a_plan_comes_back_as_it_was():
    identity = plan_cache.key("graph")
    assert plan_cache.find(identity) is None
    plan_cache.store(identity, PLAN, ("int x;",))
    assert plan_cache.find(identity) == (PLAN, ("int x;",))
    assert plan_cache.find(plan_cache.key("another graph")) is None


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-9], lambda b: b.replace(b"s0", b"s1"), lambda b: b"", lambda b: b"\xff\n"]
)
def test_what_is_damaged_is_not_trusted(cache, damage):
    identity = plan_cache.key("graph")
    plan_cache.store(identity, PLAN, ("int x;",))
    (path,) = cache.rglob("*.json")
    path.write_bytes(damage(path.read_bytes()))
    assert plan_cache.find(identity) is None
    plan_cache.store(identity, PLAN, ("int x;",))
    assert plan_cache.find(identity) == (PLAN, ("int x;",))


def test_what_others_can_write_to_is_not_trusted(cache):
    plan_cache.store(plan_cache.key("graph"), PLAN, ("int x;",))
    (path,) = cache.rglob("*.json")
    path.chmod(0o666)
    assert plan_cache.find(plan_cache.key("graph")) is None


def test_what_has_no_form_is_left_out(cache):
    plan_cache.store(plan_cache.key("graph"), ExecutionPlan("", (), {}, (), (value(object()),), {}, n, (), ()), "")
    assert not list(cache.rglob("*.json"))


def test_constants_come_back_on_their_device():
    stored = json.dumps(constants_to_json(GraphConstants({"scale": torch.tensor([[1.5, 2.0]])})))
    with torch.device("meta"):  # new tensors are there if they say nothing else
        scale = constants_from_json(json.loads(stored)).tensors["scale"]
    assert scale.device.type == "cpu"
    assert scale.tolist() == [[1.5, 2.0]]
