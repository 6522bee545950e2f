"""Backward attention on a Hopper GPU in bfloat16: opkit's kernels, in Gluon and in CUDA C++, against torch's cuDNN, in TFLOP/s.

    python benchmarks/attention_hopper_backward.py

All are captured into CUDA graphs of several calls, which alternate; the table has medians over rounds. What goes before the
kernel that multiplies, and after it, is part of a call. "determ." is with ``torch.use_deterministic_algorithms``. Operations are
those of five products: half of them of a causal call, of a window those of its width, and of packed sequences those within each.
Lists of tiles are built in each captured call, as a graph may be replayed with other sequences.
"""

from __future__ import annotations

import argparse
import functools
import json

import torch
from attention_hopper import Call, mask_of, medians, operations, print_table

from opkit.attn.calls import GradientCall
from opkit.attn.gpu.hopper import backward as hopper_backward
from opkit.attn.gpu.hopper import backward_cuda, forward_cuda, library
from opkit.attn.masks import program

KERNELS = ("gluon", "gluon determ.", "cuda", "cuda determ.", "cudnn")

Shape = tuple[int, int, int, int, int | None, int | None]
SHAPES: dict[str, Shape] = {
    # batch, heads, sequence, head, how many keys back a query sees (None: all, -1: all before it), length of packed sequences
    "8x16x2048x128 causal": (8, 16, 2048, 128, -1, None),
    "2x16x8192x128 causal": (2, 16, 8192, 128, -1, None),
    "1x16x16384x128 causal": (1, 16, 16384, 128, -1, None),
    "8x16x2048x128": (8, 16, 2048, 128, None, None),
    "2x16x8192x128": (2, 16, 8192, 128, None, None),
    "16x16x512x128 causal": (16, 16, 512, 128, -1, None),
    "16x16x1024x64 causal": (16, 16, 1024, 64, -1, None),
    "1x16x16384x64 causal": (1, 16, 16384, 64, -1, None),
    "2x16x8192x64": (2, 16, 8192, 64, None, None),
    "2x8x8192x256 causal": (2, 8, 8192, 256, -1, None),
    "2x8x8192x256": (2, 8, 8192, 256, None, None),
    "2x16x16384x128 window": (2, 16, 16384, 128, 1024, None),
    "2x16x16384x128 packed sequences": (2, 16, 16384, 128, None, 2048),
    "2x16x16384x128 causal packed sequences": (2, 16, 16384, 128, -1, 2048),
    "2x16x16384x64 window": (2, 16, 16384, 64, 1024, None),
    "2x16x16384x64 causal packed sequences": (2, 16, 16384, 64, -1, 2048),
    "2x8x16384x256 packed sequences": (2, 8, 16384, 256, None, 2048),
    "2x8x16384x256 causal packed sequences": (2, 8, 16384, 256, -1, 2048),
}


def masked(length: int, back: int | None, size: int | None) -> tuple[list[int], list[torch.Tensor]]:
    """A mask, and its tensors."""
    if size is None:
        return mask_of(back), []
    ids = (torch.arange(length, device="cuda") // size).int()[None]
    return [program.SEGMENTS, 0, 0, *([] if back is None else [*mask_of(back), program.AND])], [ids]


def calls(batch: int, heads: int, length: int, head: int, back: int | None, size: int | None) -> dict[str, Call]:
    """The kernels, on the same tensors; cuDNN has no windows and no packed sequences here."""
    q, k, v, gradient = (torch.randn(batch, heads, length, head, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    (mask, masks), scale = masked(length, back, size), head**-0.5
    out, lse = forward_cuda.forward(q, k, v, masks, [], None, None, mask, [], scale, 0.0, 0.0, False)
    arguments = (gradient, None, q, k, v, out, lse, masks, [], mask, [], scale, 0.0, False)
    kernels = {"gluon": hopper_backward.backward}
    if backward_cuda.fits(GradientCall(*arguments)) and library.compiler_there():
        kernels["cuda"] = backward_cuda.backward
    found: dict[str, Call] = {}
    for name, kernel in kernels.items():
        found[name] = functools.partial(kernel.prepare(*arguments), *arguments)
        found[f"{name} determ."] = functools.partial(deterministically, found[name])
    if size is None and (back is None or back < 0):
        found["cudnn"] = cudnn(q, k, v, gradient, back is not None)
    return found


def deterministically(call: Call) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        call()
    finally:
        torch.use_deterministic_algorithms(False)


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor, causal: bool) -> Call:
    """cuDNN's backward, of its own forward's results."""
    aten, scale = torch.ops.aten, q.shape[3] ** -0.5
    out, lse, *sizes, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    arguments = (gradient, q, k, v, out, lse, seed, offset, None, *sizes, 0.0, causal)
    return lambda: aten._scaled_dot_product_cudnn_attention_backward(*arguments, scale=scale)


def measure(shape: Shape, rounds: int) -> dict[str, float]:
    """TFLOP/s of each kernel, by five products where the forward has two."""
    batch, heads, length, head, back, size = shape
    alone = size or length
    done = 2.5 * operations(batch * (length // alone), heads, alone, head, back)
    return {name: done / each / 1e9 for name, each in medians(calls(*shape), rounds).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    rows = {name: measure(shape, rounds) for name, shape in SHAPES.items()}
    print_table(rows, KERNELS)
    print(json.dumps({"tflops": rows}))


if __name__ == "__main__":
    main()
