"""Measure how the time of a first call grows with the number of layers, and what a step costs then.

A Llama-like model (RMS norms, rotary embedding, causal attention, SwiGLU), float32 on the CPU or bfloat16 on the GPU, in
inference and training. Each row is a new process with empty caches. ``first`` is the
processor time of the first call less that of a later one, with one thread, without the C compilers' (which are processes of
their own): what else runs does not count. ``step`` is the median of later calls by the clock. Ways::

    eager            no compiler
    Dynamo           Dynamo alone: a backend that runs its graph
    opkit            torch.compile(model, backend="opkit"): repeated blocks are compiled once
    opkit, whole     the same with options={"repeated_blocks": False}
    opkit, layers    opkit.compile_layers(model)
    opkit, regions   torch.compile(model, backend="opkit") with nested_compile_region around the forward of layers
    Inductor         torch.compile(model)
    Inductor, layers opkit.compile_layers(model, backend="inductor")
    Inductor, regions  the same with regions

Run it with ``python benchmarks/layers.py [--depths 8,16,32] [--ways "opkit;Inductor"] [--modes training] [--device cuda]``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import opkit

WAYS = (
    "eager", "Dynamo", "opkit", "opkit, whole", "opkit, layers", "opkit, regions",
    "Inductor", "Inductor, layers", "Inductor, regions",
)  # fmt: skip
SIZES = {"cpu": (128, 4, 2, 128), "cuda": (1024, 16, 4, 1024)}  # width, heads, batch, tokens
STEPS = 9


class Layer(nn.Module):
    """A layer of a Llama-like model."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(_rotated(q, cos, sin), _rotated(k, cos, sin), v, is_causal=True)
        y = opkit.checkpoint_name(y, "attention")  # for layer_memory.py
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.after(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class Llama(nn.Module):
    """Embedding, layers, head."""

    def __init__(self, depth: int, width: int, heads: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(1000, width), nn.Linear(width, 1000)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(x)


def compiled(model: nn.Module, way: str) -> Callable[..., Any]:
    """The model, compiled in one of the ways."""
    name, _, what = way.partition(", ")
    backend = {"opkit": "opkit", "Inductor": "inductor", "Dynamo": "eager"}.get(name, "")
    if what == "layers":
        opkit.compile_layers(model, backend=backend)
        return model
    if what == "regions":
        Layer.forward = torch.compiler.nested_compile_region(Layer.forward)
    options = {"strict": True, "repeated_blocks": what != "whole"} if name == "opkit" else None
    return torch.compile(model, backend=backend, options=options) if backend else model


def measure(way: str, mode: str, depth: int, device: str) -> dict[str, Any]:
    """One row, in a process of its own."""
    width, heads, batch, tokens = SIZES[device]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = Llama(depth, width, heads).to(device, dtype)
    given = torch.randint(0, 1000, (batch, tokens), device=device)
    cos, sin = (torch.randn(tokens, width // heads // 2, device=device, dtype=dtype) for _ in range(2))
    function = compiled(model, way)

    def step() -> None:
        with torch.set_grad_enabled(mode == "training"):
            result = function(given, cos, sin)
        if mode == "training":
            result.float().square().mean().backward()
            model.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()

    def timed(clock: Callable[[], float]) -> float:
        start = clock()
        step()
        return clock() - start

    first, later = timed(time.process_time), timed(time.process_time)
    for _ in range(3):
        step()
    steps = [timed(time.perf_counter) for _ in range(STEPS)]
    return {"way": way, "mode": mode, "depth": depth, "first": first - later, "step": statistics.median(steps)}


def _row(way: str, mode: str, depth: int, device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        caches = {
            "OPKIT_CACHE_DIR": f"{folder}/o",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/i",
            "TRITON_CACHE_DIR": f"{folder}/t",
        }
        command = [sys.executable, __file__, "--row", json.dumps([way, mode, depth, device])]
        done = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"way": way, "mode": mode, "depth": depth, "error": done.stderr.strip().splitlines()[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print a line for each row as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default="8,16,32,64,128")
    parser.add_argument("--ways", default=";".join(WAYS), help="with semicolons between them")
    parser.add_argument("--modes", default="inference,training")
    parser.add_argument("--device", choices=tuple(SIZES), default="cpu")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(measure(*json.loads(options.row))))
        return
    for mode in options.modes.split(","):
        for way in options.ways.split(";"):
            for depth in map(int, options.depths.split(",")):
                row = _row(way, mode, depth, options.device)
                figures = row.get("error") or f"first {row['first']:7.2f} s, step {row['step'] * 1e3:8.2f} ms"
                print(f"{mode:9} {way:17} {depth:4} layers: {figures}", flush=True)


if __name__ == "__main__":
    main()
