"""Count how often a model is recompiled while the sizes of its inputs change."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from compile_backends import compiled
from compile_models import MODELS, Task, inputs_of, task
from compile_parts import dtype_of, graphs
from torch._dynamo.utils import get_compilation_metrics

COUNT = 20
_BATCHES, _LENGTHS = (1, 2, 3, 4, 5, 7, 8), (8, 17, 24, 31, 40, 48, 56, 64)


def sizes(seed: int = 0) -> list[tuple[int, int]]:
    """The sweep: :data:`COUNT` batches and lengths, none twice; with this seed, batches of one come fifth and last but one."""
    every = [(batch, length) for batch in _BATCHES for length in _LENGTHS]
    return random.Random(seed).sample(every, COUNT)


def sweep(model: str, mode: str, dtype: str, backend: str) -> dict[str, Any]:
    """Recompiles, their reasons, seconds beyond eager's, and the largest error compared with eager, over the sweep.

    One small module serves all sizes. The error is relative to the largest of eager's numbers; dropout is off.
    """
    how = "gradients" if mode == "training" else mode
    module = task(model, how, dtype_of(dtype), small=True).module
    call = compiled(backend, module)
    compiled_seconds = eager_seconds = worst = 0.0
    for size in sizes():
        made = Task(module, inputs_of(MODELS[model], how, dtype_of(dtype), size), how != "inference")
        expected, took = _timed(made.step())
        found, took_compiled = _timed(made.step(call))
        eager_seconds, compiled_seconds = eager_seconds + took, compiled_seconds + took_compiled
        worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
    reasons = [metric.recompile_reason for metric in get_compilation_metrics() if metric.recompile_reason]
    return {
        "graphs": graphs(),
        "recompiles": len(reasons),
        "reasons": reasons,
        "seconds": compiled_seconds - eager_seconds,
        "error": worst,
    }


def _timed(step: Any) -> tuple[torch.Tensor, float]:
    start = time.perf_counter()
    found = step()
    return found.detach().double(), time.perf_counter() - start
