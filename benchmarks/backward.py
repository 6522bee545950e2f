"""Compare a derived backward with the reference's own autograd plus one more forward.

The kernel of every operator here is its reference, so that only the rule differs: the forward and backward of the
operator against the forward and backward of the reference under torch's autograd plus one forward, and the bytes that
each holds for the backward. Interleaved, medians. Run it with ``python benchmarks/backward.py``.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

import opkit

ROUNDS = 61
GOAL = 1.1


def rms_norm(x: Float[Tensor, "*batch d"], w: Float[Tensor, "d"]) -> Float[Tensor, "*batch d"]:
    """Root-mean-square layer normalisation."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def softmax(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Softmax over the last dimension."""
    return torch.softmax(x, -1)


def swiglu(x: Float[Tensor, "*batch d"], y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Gated SiLU."""
    return F.silu(x) * y


def cross_entropy(x: Float[Tensor, "n c"], t: Int[Tensor, "n"]) -> Float[Tensor, ""]:
    """Mean cross-entropy."""
    return F.cross_entropy(x, t)


def attention(
    q: Float[Tensor, "b n d"], k: Float[Tensor, "b m d"], v: Float[Tensor, "b m d"]
) -> Float[Tensor, "b n d"]:
    """Attention written out."""
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def layer_norm(x: Float[Tensor, "*batch d"], w: Float[Tensor, "d"]) -> Float[Tensor, "*batch d"]:
    """Layer normalisation."""
    return F.layer_norm(x, w.shape, w)


CASES: dict[str, tuple[Callable[..., Tensor], Callable[[], list[Tensor]]]] = {
    "rms_norm": (rms_norm, lambda: [torch.randn(2048, 1024), torch.randn(1024)]),
    "layer_norm": (layer_norm, lambda: [torch.randn(2048, 1024), torch.randn(1024)]),
    "softmax": (softmax, lambda: [torch.randn(2048, 1024)]),
    "swiglu": (swiglu, lambda: [torch.randn(2048, 1024), torch.randn(2048, 1024)]),
    "cross_entropy": (cross_entropy, lambda: [torch.randn(2048, 1024), torch.randint(1024, (2048,))]),
    "attention": (attention, lambda: [torch.randn(8, 256, 64) for _ in range(3)]),
}


def saved_bytes(function: Callable[..., Tensor], args: list[Tensor]) -> int:
    """Bytes of the distinct storages that the backward holds."""
    nbytes_of: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        nbytes_of[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function(*args)
    del output
    return sum(nbytes_of.values())


def seconds(function: Callable[..., Tensor], args: list[Tensor], backward: bool) -> float:
    """Seconds of one forward, with or without its backward."""
    leaves = [a for a in args if a.requires_grad]
    start = time.perf_counter()
    if backward:
        output = function(*args)
        torch.autograd.grad(output, leaves, torch.ones_like(output))
    else:
        with torch.no_grad():
            function(*args)
    return time.perf_counter() - start


def compare(name: str) -> dict[str, Any]:
    """One row of the table."""
    reference, make = CASES[name]
    op = opkit.custom_op(f"bench_backward::{name}", reference)
    op.register_kernel("cpu", reference)
    args = [a.requires_grad_(a.is_floating_point()) for a in make()]
    seconds(op, args, True)
    rounds = [
        (seconds(op, args, True), seconds(reference, args, True), seconds(reference, args, False))
        for _ in range(ROUNDS)
    ]
    ours, own = saved_bytes(op, args), saved_bytes(reference, args)
    return {
        "op": name,
        "derived_ms": round(statistics.median(r[0] for r in rounds) * 1e3, 2),
        "own_plus_forward_ms": round(statistics.median(r[1] + r[2] for r in rounds) * 1e3, 2),
        "time_ratio": round(statistics.median(a / (b + c) for a, b, c in rounds), 3),
        "derived_mb": round(ours / 1e6, 2),
        "own_mb": round(own / 1e6, 2),
        "bytes_ratio": round(ours / own, 3),
    }


def main() -> None:
    """Print the table and one JSON line."""
    rows = [compare(name) for name in CASES]
    print(
        f"{'op':14} {'derived ms':>10} {'own+fwd ms':>10} {'ratio':>6} {'saved MB':>9} {'own MB':>7} {'ratio':>6}   goal {GOAL}"
    )
    for r in rows:
        met = "" if r["time_ratio"] <= GOAL and r["bytes_ratio"] <= GOAL else "  short"
        print(
            f"{r['op']:14} {r['derived_ms']:10.2f} {r['own_plus_forward_ms']:10.2f} {r['time_ratio']:6.3f} "
            f"{r['derived_mb']:9.2f} {r['own_mb']:7.2f} {r['bytes_ratio']:6.3f}{met}"
        )
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
