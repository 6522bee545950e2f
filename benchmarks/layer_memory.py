"""Measure the memory and the time of training steps on one GPU, by what layers keep for the backward.

The Llama-like model of ``layers.py`` in bfloat16: forward, loss and backward, no optimizer. ``peak`` is the memory above that
of parameters and gradients. ``moved`` is what opkit copies to the host in a step, and ``bound`` the time of these copies and
those back at the bandwidth of the link, which is measured first: a step cannot take less. ``loss`` says whether the loss is that
of "save_all" to the bit, and ``gradient`` the same of the embedding's gradient, with deterministic kernels. Peers are torch's
``checkpoint`` of each layer and ``save_on_cpu`` around the model.

With ``--longest``, the longest sequence is found for each policy: the peak grows linearly with the sequence, so that two
lengths predict it, and a step of 0.95 times that length and one of 1.1 times show whether it is right. Lengths above
``MAX_RUN`` tokens are not run: their attention takes minutes. The host's memory may hold fewer.

With ``--budgets``, ``opkit.fit`` chooses the policies.

Run it with ``python benchmarks/layer_memory.py [--depth 32] [--width 4096] [--tokens 8192] [--policies "save_all;offload()"]``.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from layers import Llama
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import opkit
from opkit.layers.offloading import Region

STEPS = 3
MAX_RUN = 65536
ATTENTION = opkit.keep("attention")


def _quarter(count: int) -> list[Any]:
    return [opkit.offload() if k % 4 == 0 and k + 4 < count else "save_all" for k in range(count)]


WAYS: dict[str, Any] = {
    "save_all": "save_all",
    "recompute_all": "recompute_all",
    "torch checkpoint": None,
    "recompute_cheap": "recompute_cheap",
    "keep('attention')": ATTENTION,
    "offload('recompute_all')": opkit.offload("recompute_all"),
    "offload(keep('attention'))": opkit.offload(ATTENTION),
    "offload('recompute_cheap')": opkit.offload("recompute_cheap"),
    "offload() in a quarter": _quarter,
    "offload()": opkit.offload(),
    "torch save_on_cpu": None,
}


def prepare(model: nn.Module, way: str) -> Callable[..., Tensor]:
    """The function of a forward in one of the ways."""
    opkit.checkpoint_layers(model, "save_all")
    policy = WAYS[way]
    if policy is not None:
        opkit.checkpoint_layers(model, policy(len(model.layers)) if callable(policy) else policy)
        return model
    if way == "torch checkpoint":

        def checkpointed(tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            x = model.embedding(tokens)
            for layer in model.layers:
                x = checkpoint(layer, x, cos, sin, use_reentrant=False)
            return model.head(x)

        return checkpointed

    def on_cpu(*args: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return model(*args)

    return on_cpu


def inputs(model: nn.Module, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and the tables of the rotary embedding."""
    width, heads = model.embedding.embedding_dim, model.layers[0].heads
    generator = torch.Generator("cuda").manual_seed(0)
    given = torch.randint(0, 1000, (1, tokens), device="cuda", generator=generator)
    angles = torch.arange(tokens, device="cuda").unsqueeze(1) / 10_000 ** torch.linspace(
        0, 1, width // heads // 2, device="cuda"
    )
    return given, angles.cos().bfloat16(), angles.sin().bfloat16()


def step(function: Callable[..., Tensor], model: nn.Module, given: Any) -> float:
    """A training step."""
    loss = nn.functional.cross_entropy(function(*given).flatten(0, 1).float(), given[0].flatten())
    loss.backward()
    return loss.item()


def peak(function: Callable[..., Tensor], model: nn.Module, given: Any) -> int:
    """The memory of a step above that of parameters and gradients."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(function, model, given)
    return torch.cuda.max_memory_allocated() - before


def link() -> tuple[float, float]:
    """Bytes a second to pinned host memory, and back."""
    on_gpu = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    on_host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)

    def bandwidth(into: Tensor, of: Tensor) -> float:
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            into.copy_(of, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return of.nbytes / statistics.median(times)

    return bandwidth(on_host, on_gpu), bandwidth(on_gpu, on_host)


def moved(function: Callable[..., Tensor], model: nn.Module, given: Any) -> int:
    """The bytes that opkit copies to the host in a forward."""
    total, end = 0, Region.end

    def counted(region: Region) -> None:
        nonlocal total
        total += region.nbytes
        end(region)

    Region.end = counted
    try:
        step(function, model, given)
    finally:
        Region.end = end
    return total


def compare(model: nn.Module, ways: list[str], tokens: int) -> None:
    """Print a line for each way; times are medians of steps that take turns."""
    given = inputs(model, tokens)
    functions: dict[str, Callable[..., Tensor]] = {}
    rows: dict[str, dict[str, Any]] = {way: {"seconds": []} for way in ways}
    to_host, back = link()
    print(f"link: {to_host / 1e9:.1f} GB/s to the host, {back / 1e9:.1f} GB/s back", flush=True)
    reference: tuple[float, Tensor] | None = None
    for way in list(rows):
        model.zero_grad(set_to_none=False)
        row = rows[way]
        try:
            functions[way] = prepare(model, way)
            torch.use_deterministic_algorithms(True)
            row["loss"] = step(functions[way], model, given)
            gradient = model.embedding.weight.grad.clone()
            torch.use_deterministic_algorithms(False)
            row["peak"] = peak(functions[way], model, given)
            row["moved"] = moved(functions[way], model, given)
        except torch.OutOfMemoryError:
            print(f"{way:28} out of memory", flush=True)
            del rows[way]
            gc.collect()
            continue
        reference = reference or (row["loss"], gradient)
        row["same"] = (row["loss"] == reference[0], torch.equal(gradient, reference[1]))
    for _ in range(STEPS):
        for way, row in rows.items():
            function = prepare(model, way)
            model.zero_grad(set_to_none=False)
            torch.cuda.synchronize()
            start = time.perf_counter()
            step(function, model, given)
            torch.cuda.synchronize()
            row["seconds"].append(time.perf_counter() - start)
    base = statistics.median(next(iter(rows.values()))["seconds"])
    for way, row in rows.items():
        seconds = statistics.median(row["seconds"])
        bound = row["moved"] / to_host + row["moved"] / back
        print(
            f"{way:28} peak {row['peak'] / 2**30:6.2f} GiB  step {seconds * 1e3:7.1f} ms ({seconds / base:.3f})  moved "
            f"{row['moved'] / 2**30:6.2f} GiB (bound {bound * 1e3:6.1f} ms)  loss {row['same'][0]}  gradient {row['same'][1]}",
            flush=True,
        )
        print(json.dumps({"way": way, **row, "seconds": seconds, "bound": bound}))


def longest(model: nn.Module, ways: list[str], tokens: int) -> None:
    """Print the longest sequence of each way."""
    for way in ways:
        function = prepare(model, way)
        model.zero_grad(set_to_none=False)
        torch.cuda.empty_cache()
        try:
            short, long = (peak(function, model, inputs(model, n)) for n in (tokens // 2, tokens))
        except torch.OutOfMemoryError:
            print(f"{way:28} out of memory at {tokens}", flush=True)
            continue
        free = torch.cuda.mem_get_info()[1] - torch.cuda.memory_allocated()
        slope = (long - short) / (tokens - tokens // 2)
        predicted = int((free - (long - slope * tokens)) / slope) // 1024 * 1024
        outcomes = []
        for length in (int(predicted * 0.95) // 1024 * 1024, int(predicted * 1.1)) if predicted <= MAX_RUN else ():
            torch.cuda.empty_cache()
            try:
                step(function, model, inputs(model, length))
                outcomes.append(f"{length} fits")
            except torch.OutOfMemoryError:
                outcomes.append(f"{length} does not fit")
            gc.collect()
        on_host = moved(function, model, inputs(model, tokens)) / tokens
        memory = f"{slope / 2**20:.3f} MiB a token, {on_host / 2**20:.3f} on the host"
        print(f"{way:28} {memory}: predicted {predicted} tokens; {', '.join(outcomes) or 'not run'}", flush=True)


def fitted(model: nn.Module, budgets: list[float], tokens: int) -> None:
    """Print what opkit.fit chooses for each budget, and the peak and the time of a step with it."""
    given = inputs(model, tokens)
    for budget in budgets:
        start = time.perf_counter()
        found = opkit.fit(model, int(budget * 2**30), *given)
        chosen = time.perf_counter() - start
        above = peak(model, model, given)
        times = []
        for _ in range(STEPS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            step(model, model, given)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        print(
            f"{found}\nchosen in {chosen:.1f} s, peak {above / 2**30:.2f} GiB, step {statistics.median(times) * 1e3:.1f} ms\n",
            flush=True,
        )


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--policies", default=";".join(WAYS), help="with semicolons between them")
    parser.add_argument("--longest", action="store_true")
    parser.add_argument("--budgets", help="GiB for opkit.fit, with commas between them")
    options = parser.parse_args()
    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = Llama(options.depth, options.width, options.width // 128)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if options.budgets:
        fitted(model, [float(each) for each in options.budgets.split(",")], options.tokens)
    else:
        (longest if options.longest else compare)(model, options.policies.split(";"), options.tokens)


if __name__ == "__main__":
    main()
