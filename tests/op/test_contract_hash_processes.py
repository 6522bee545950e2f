"""The contract hash across processes, and that torch's compile caches obey it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import fresh_process
import pytest


def test_the_hash_is_stable_across_processes(tmp_path):
    source = """
        import json, enum, functools, torch, opkit
        class Mode(enum.Enum):
            A = 1
        NAMES = {"a", "b", "c"}
        TABLE = {"x": torch.arange(3), "y": [1, 2.5]}
        def helper(x): return x * len(NAMES) if x.dtype in (torch.float32, torch.float16) else x
        class Box:
            def __init__(self): self.items = frozenset(["p", "q", "r"]); self.call = functools.partial(helper)
            def __call__(self, x): return self.call(x)
        box = Box()
        @opkit.custom_op("thash_processes::stable", mutates_args=())
        def op(x: torch.Tensor) -> torch.Tensor:
            return box(x) * TABLE["y"][0] if "z" not in {"u", "v"} else x
        @op.register_kernel("cpu", dtypes=[torch.float32, torch.float16, torch.bfloat16])
        def kernel(x): return x.clone()
        print(json.dumps(op.describe().contract_hash))
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(source))
    seeded = os.environ | {"PYTHONHASHSEED": "17"}  # which a new interpreter reads
    other = subprocess.run([sys.executable, script], env=seeded, stdout=subprocess.PIPE, text=True, check=True)
    assert fresh_process.run([script]).stdout == other.stdout != ""


# One process holds one operator for each kind of edit. In the second run every @PART@ reads 3 in place of 2, so each
# operator's result changes, and only because of the part under test.
HELPERS = """
def helper(x):
    return x * {factor}
"""


SCRIPT = """
import json, sys
import torch, opkit, users_helpers
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config

# An empty cache has no header compiled ahead, and none of the programs that try instruction sets.
config.cpp_cache_precompile_headers = False
config.cpp.simdlen = 1

FACTOR = {factor}
SPELLING = {spelling!r}

def closed_over(factor):
    def function(x: Tensor) -> Tensor:
        return x * factor
    return function

@opkit.custom_op("tcache::body", mutates_args=())
def body(x: Tensor) -> Tensor:
    return x * {factor}

@opkit.custom_op("tcache::helper", mutates_args=())
def helper(x: Tensor) -> Tensor:
    return users_helpers.helper(x)

closure = opkit.custom_op("tcache::closure", closed_over({factor}), mutates_args=())

@opkit.custom_op("tcache::constant", mutates_args=())
def constant(x: Tensor) -> Tensor:
    return x * FACTOR

@opkit.custom_op("tcache::kernel", mutates_args=())
def kernel(x: Tensor) -> Tensor:
    return x * 1
kernel.register_kernel("cpu", lambda x: x * {factor})

@opkit.custom_op("tcache::fake", mutates_args=(), opaque=True)
def fake(x: Tensor, n: int) -> Tensor:
    return x.repeat(n)
fake.register_fake(lambda x, n: x.new_empty(x.shape[0] * {factor}))

@opkit.custom_op("tcache::backward", mutates_args=())
def backward(x: Tensor) -> Tensor:
    return x * 1
backward.register_kernel("cpu", lambda x: x * 1)
backward.register_autograd(lambda ctx, grad: grad * {factor})

@opkit.custom_op("tcache::inlined_backward", mutates_args=())
def inlined_backward(x: Tensor) -> Tensor:
    return x * 1
inlined_backward.register_autograd(lambda ctx, grad: grad * {factor})

@opkit.custom_op("tcache::derived_backward", mutates_args=())
def derived_backward(x: Tensor) -> Tensor:
    return x * {factor}
derived_backward.register_kernel("cpu", lambda x: x * {factor})

@opkit.custom_op("tcache::mutates", mutates_args=("x",) if {factor} == 3 else ("y",))
def mutates(x: Tensor, y: Tensor) -> None:
    (x if {factor} == 3 else y).mul_(5)

def spelled(op):
    if SPELLING == "object":
        return op
    return lambda *args: getattr(torch.ops.tcache, op.name.split("::")[1])(*args)

def run(name, function, x):
    torch._dynamo.reset()
    before = {{k: v for k, v in counters["aot_autograd"].items()}}
    value = function(x)
    found = {{k: v - before.get(k, 0) for k, v in counters["aot_autograd"].items()}}
    results[name] = float(value)
    hits[name] = found.get("autograd_cache_hit", 0)
    misses[name] = found.get("autograd_cache_miss", 0) + found.get("autograd_cache_bypass", 0)

def forward(op):
    call = torch.compile(lambda x: spelled(op)(x) + 1, fullgraph=True)
    return lambda x: call(x)[0] - 1

def gradient(op):
    call = torch.compile(lambda x: spelled(op)(x) + 1, fullgraph=True)
    return lambda x: torch.autograd.grad(call(x.requires_grad_()).sum(), x)[0][0]

def sized(op):
    call = torch.compile(lambda x: spelled(op)(x, {factor}).shape[0] * x, fullgraph=True)
    return lambda x: call(x)[0] / x.shape[0]

def written(op):
    def model(x):
        y, z = x + 0, x + 0
        spelled(op)(y, z)
        return y
    call = torch.compile(model, fullgraph=True)
    return lambda x: call(x)[0]

results, hits, misses = {{}}, {{}}, {{}}
programs = dict.fromkeys((body, helper, closure, constant, kernel), forward)
programs |= dict.fromkeys((backward, inlined_backward, derived_backward), gradient)
programs |= {{fake: sized, mutates: written}}
for op, program in programs.items():
    if not sys.argv[1:] or op.name.split("::")[1] in sys.argv[1:]:
        run(op.name, program(op), torch.ones(4))
print(json.dumps([results, hits, misses]))
"""


@pytest.mark.parametrize(
    ("spelling", "parts"),
    [
        pytest.param("object", ["helper", "backward"], marks=pytest.mark.exhaustive),
        pytest.param("object", [], marks=pytest.mark.exhaustive),
        pytest.param("torch.ops", [], marks=pytest.mark.exhaustive),
    ],
    ids=["some", "object", "torch.ops"],
)
def test_an_edit_is_never_served_from_a_stale_cache(tmp_path, spelling, parts):
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(factor):
        (tmp_path / "users_helpers.py").write_text(HELPERS.format(factor=factor))
        script = tmp_path / "script.py"
        script.write_text(SCRIPT.format(factor=factor, spelling=spelling))
        ran = fresh_process.run([script, *parts], os.environ | caches | {"PYTHONPATH": path})
        return json.loads(ran.stdout.splitlines()[-1])

    first, _, _ = run(2)
    again, hits, misses = run(2)
    edited, _, _ = run(3)
    assert first == again == {name: (1.0 if name == "tcache::mutates" else 2.0) for name in first}
    assert edited == {name: (5.0 if name == "tcache::mutates" else 3.0) for name in first}
    assert all(hits.values()), (hits, misses)
    assert not any(misses.values()), (hits, misses)
