"""The launcher with CUDA's own driver: Triton kernels on a GPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from opkit import _core

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.gpu

BLOCK = 128
ROWS = [
    ("PACKED_TENSOR", "x", "tensor"),
    ("PACKED_TENSOR", "y", "tensor"),
    ("PACKED_TENSOR", "out", "tensor"),
]


@triton.jit
def _add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x + at, at < n) + tl.load(y + at, at < n)
    tl.store(out + at, total, at < n)


@triton.jit
def _increment(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, at < n) + 1, at < n)


@triton.jit
def _copy_tile(source, out, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m, n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    tile = source.load([m, n])
    rows, columns = m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
    tl.store(out + rows[:, None] * 256 + columns[None, :], tile)


def compile_for(capability: int, function: Any, signature: dict[str, str], constexprs: dict[str, Any]) -> Any:
    """Needs no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = signature | dict.fromkeys(constexprs, "constexpr")
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs={(i,): constexprs[n] for i, n in enumerate(signature) if n in constexprs},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))


def _binary(compiled: Any) -> _core.Binary:
    driver = _core.Driver("libcuda.so.1", "cuda")
    made = compiled.metadata
    return _core.Binary(driver, compiled.asm["cubin"], made.name, threads=32 * made.num_warps, shared=made.shared)


def _here(function: Any, signature: dict[str, str], **constexprs: Any) -> Any:
    major, minor = torch.cuda.get_device_capability()
    return compile_for(10 * major + minor, function, signature, constexprs)


SCRATCH = [("scratch", 0, 0), ("profile_scratch", 0, 0)]


@pytest.fixture
def add(launched):
    signature = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}
    params = [("ptr", 0, 0), ("ptr", 1, 0), ("ptr", 2, 0), ("i32", 3, 0), *SCRATCH]

    def miss(call: _core.Call) -> _core.Entry:
        return _core.Entry(_binary(_here(_add, signature, BLOCK=BLOCK)), (-(-call.values[3] // BLOCK), 1, 1), params)

    return launched("add(Tensor x, Tensor y) -> Tensor", [*ROWS, ("NUMEL", "out", "exact")], miss, cuda=True)


def test_a_triton_kernel_is_launched(add):
    x, y = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
    for _ in range(3):
        assert torch.equal(add(x, y), x + y)
    assert len(add.missed) == 1


def test_on_another_stream_and_in_a_thread_that_never_used_cuda(add):
    x = torch.randn(1000, device="cuda")
    torch.cuda.synchronize()
    results = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            results.append(add(x, x))
            torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert torch.equal(results[0], 2 * x)


def test_the_first_call_may_be_captured(add):
    x, y = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = add(x, y)
    assert len(add.missed) == 1
    x.fill_(3)
    graph.replay()
    assert torch.equal(out, x + y)


def test_a_kernel_is_measured_and_memory_restored(launched):
    took = []
    params = [("ptr", 0, 0), ("i32", 1, 0), *SCRATCH]

    def miss(call: _core.Call) -> _core.Entry:
        compiled = _here(_increment, {"x": "*fp32", "n": "i32"}, BLOCK=BLOCK)
        entry = _core.Entry(_binary(compiled), (call.values[1] // BLOCK, 1, 1), params)
        took.append(call.time(entry, written=[0]))
        assert not call.capturing
        return entry

    rows = [("PACKED_TENSOR", "x", "tensor"), ("NUMEL", "x", "exact")]
    increment = launched("increment(Tensor(a!) x) -> ()", rows, miss, cuda=True)
    x = torch.zeros(1 << 20, device="cuda")
    increment(x)
    assert torch.equal(x, torch.ones_like(x))
    assert 0 < took[0] < 10


def test_parameters_that_do_not_fit_are_told(launched):
    params = [("ptr", 0, 0), ("i64", 1, 0), *SCRATCH]
    compiled = _here(_increment, {"x": "*fp32", "n": "i32"}, BLOCK=BLOCK)
    entry = _core.Entry(_binary(compiled), (1, 1, 1), params)
    rows = [("PACKED_TENSOR", "x", "tensor"), ("NUMEL", "x", "exact")]
    increment = launched("increment(Tensor(a!) x) -> ()", rows, lambda call: entry, cuda=True)
    with pytest.raises(RuntimeError, match="parameter 1 of its compiled function has 4 bytes, and i64 has 8"):
        increment(torch.zeros(4, device="cuda"))


def test_attributes_are_those_of_the_driver():
    found = _binary(_here(_increment, {"x": "*fp32", "n": "i32"}, BLOCK=BLOCK)).attributes(0)
    assert 0 < found["registers"] <= 255
    assert found["local_bytes"] == 0
    assert found["max_threads"] >= 128


def test_a_tensor_descriptor(launched):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs the tensor memory accelerator of sm_90")
    compiled = _here(_copy_tile, {"source": "tensordesc<fp32[16, 32]>", "out": "*fp32"}, BLOCK_M=16, BLOCK_N=32)
    params = [
        ("map", 0, 0),
        ("size32", 0, 0),
        ("size32", 0, 1),
        ("stride64", 0, 0),
        ("stride64", 0, 1),
        ("ptr", 1, 0),
        *SCRATCH,
    ]
    entry = _core.Entry(_binary(compiled), (4, 8, 1), params, maps=[described(compiled)])
    rows = [("TENSOR", "source", "info"), ("TENSOR", "out", "tensor")]
    copy = launched("copied(Tensor source) -> Tensor", rows, lambda call: entry, cuda=True)
    wide = torch.randn(128, 256, device="cuda")
    for source in (wide[:64], wide[64:], wide[:64]):
        assert torch.equal(copy(source), source)


def described(compiled: Any) -> dict[str, Any]:
    """The one tensor descriptor of a kernel of float32: CUtensorMapDataType 7."""
    (row,) = compiled.metadata.tensordesc_meta
    kept = {name: row[name] for name in ("swizzle", "elem_size", "fp4_padded")}
    return kept | {"source": 0, "elem_type": 7, "block": list(row["block_size"])}
