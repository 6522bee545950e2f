"""Generate text for many requests, with pages of a cache that they share and batches that change at every step.

    python examples/generation.py
    python examples/generation.py --size small --dtype bfloat16
    python examples/generation.py --size 1b --dtype bfloat16 --device cuda

The model is Llama's, with random weights. Requests come all at once, with prompts that begin alike, as with a system prompt;
prompts and answers differ in length. ``paged_requests.py`` decides what is computed at each step. Variants keep keys and values
in the model's dtype, in int8 or in float8. If transformers is installed, its own generation runs with the same weights: batch
after batch, with a static cache, and its continuous batching. In float32 the example asserts that each variant with an exact
cache draws the tokens that full attention draws without a cache. See docs/pipelines.md for tables.
"""

# pyright: reportMissingImports=false
# transformers need not be installed

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from paged_requests import Batch, Pages, Request, Scheduler, unpacked
from pipeline_table import Row, measured, parsed, parser, table
from torch import Tensor, nn

import opkit


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the model, and of the requests: how many there are, how many run at once, their tokens, and tokens of one step."""

    layers: int
    heads: int
    kv_heads: int
    width: int
    hidden: int
    vocabulary: int
    requests: int
    at_once: int
    shared: int
    longest_prompt: int
    longest_answer: int
    most_tokens: int
    page: int = 16

    @property
    def longest(self) -> int:
        return self.shared + self.longest_prompt + self.longest_answer

    @property
    def pages(self) -> int:
        """Of one request."""
        return -(-self.longest // self.page)


SIZES = {
    "tiny": Sizes(2, 4, 2, 64, 128, 256, 6, 3, 20, 30, 12, 32),
    "small": Sizes(8, 8, 2, 512, 1536, 8192, 16, 8, 128, 128, 64, 256),
    "1b": Sizes(16, 32, 8, 2048, 8192, 128256, 64, 32, 512, 512, 128, 2048),
}


# ---- the model -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Cache:
    """Pages of one layer, and the scales of int8 or float8 pages, as ``opkit.append_kv`` writes them."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = sizes.heads, sizes.kv_heads, sizes.width // sizes.heads
        self.norm, self.mlp_norm = nn.RMSNorm(sizes.width, 1e-5), nn.RMSNorm(sizes.width, 1e-5)
        self.qkv = nn.Linear(sizes.width, (sizes.heads + 2 * sizes.kv_heads) * self.size, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)
        self.gate_up = nn.Linear(sizes.width, 2 * sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], attention: Callable[..., Tensor]) -> Tensor:
        """Return ``x`` of (tokens, width), attended; ``turn`` are the cosines and sines of the tokens' positions."""
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, self.size))
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)
        x = x + self.out(attention(rotated(q, *turn), rotated(k, *turn), v).flatten(1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs of elements of (tokens, heads, head size) that are half a head apart (Su et al., RoFormer, 2021)."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class Llama(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, 1e-5)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        size = sizes.width // sizes.heads
        angles = torch.outer(torch.arange(sizes.longest), 10000.0 ** (-torch.arange(0, size, 2) / size))
        self.register_buffer("cos", angles.cos()[:, None], persistent=False)
        self.register_buffer("sin", angles.sin()[:, None], persistent=False)

    def forward(
        self, tokens: Tensor, positions: Tensor, last: Tensor, attentions: Sequence[Callable[..., Tensor]]
    ) -> Tensor:
        """Return the logits after the tokens at ``last``; each layer has its own attention."""
        x, turn = self.tokens(tokens), (self.cos[positions], self.sin[positions])
        for layer, attention in zip(self.layers, attentions, strict=True):
            x = layer(x, turn, attention)
        return self.head(self.norm(x[last]))


class Paged(nn.Module):
    """The model on batches of a scheduler; its cache is written in place."""

    def __init__(self, model: Llama, caches: list[Cache]) -> None:
        super().__init__()
        self.model, self.caches = model, caches

    def forward(self, tokens: Tensor, positions: Tensor, starts: Tensor, before: Tensor, pages: Tensor) -> Tensor:
        """Return the next token of each request."""
        lengths = before + starts.diff()

        def attention_of(cache: Cache) -> Callable[..., Tensor]:
            keys, values, k_scale, v_scale = cache.k, cache.v, cache.k_scale, cache.v_scale

            def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                opkit.append_kv(k, v, keys, values, pages, before, cu_seqlens=starts, k_scale=k_scale, v_scale=v_scale)
                return opkit.paged_attention(
                    q, keys, values, pages, lengths, cu_seqlens_q=starts, k_scale=k_scale, v_scale=v_scale
                )

            return attention

        logits = self.model(tokens, positions, starts[1:] - 1, [attention_of(cache) for cache in self.caches])
        return logits.argmax(-1)


def by_full_attention(model: Llama, request: Request) -> list[int]:
    """Return the tokens that the model draws for one request, all computed anew for each; the reference."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    tokens = torch.tensor(request.tokens[: request.prompt], device=model.cos.device)
    for _ in range(request.wanted):
        positions = torch.arange(len(tokens), device=tokens.device)
        logits = model(tokens, positions, positions[-1:], [attention] * len(model.layers))
        tokens = torch.cat([tokens, logits.argmax(-1)])
    return tokens[request.prompt :].tolist()


# ---- generation ------------------------------------------------------------------------------------------------------


class Engine:
    """Runs requests: on GPUs a batch with a token of each request is padded to one size, and recorded as a CUDA graph.

    Such a batch takes as long as reading the weights and the cache, whatever its size.
    """

    def __init__(self, model: Llama, sizes: Sizes, dtype: torch.dtype, backend: str | None) -> None:
        self.sizes, self.device = sizes, model.cos.device
        count = sizes.at_once * sizes.pages + 1
        narrow = dtype in (torch.int8, torch.float8_e4m3fn)

        def pages() -> Tensor:
            size = sizes.width // sizes.heads
            return torch.zeros(count, sizes.page, sizes.kv_heads, size, dtype=dtype, device=self.device)

        def scale() -> Tensor | None:
            return torch.ones(count, sizes.page, sizes.kv_heads, device=self.device) if narrow else None

        self.count = count
        self.paged = Paged(model, [Cache(pages(), pages(), scale(), scale()) for _ in range(sizes.layers)])
        self.mixed = self.decoding = self.paged
        if backend is not None:
            self.mixed = torch.compile(self.paged, backend=backend, dynamic=True, fullgraph=True)
            self.decoding = torch.compile(self.paged, backend=backend, dynamic=False, fullgraph=True)
        self._recorded: Tensor | None = None  # the batch that a recorded graph reads, at the same address each time

    def __call__(self, requests: Sequence[Request]) -> Scheduler:
        """Draw all tokens of all requests; return the scheduler, with what it counted."""
        scheduler = Scheduler(Pages(self.count, self.sizes.page), self.sizes.at_once, self.sizes.most_tokens)
        for request in requests:
            scheduler.add(request)
        while (batch := scheduler.step()) is not None:
            scheduler.update(batch, self._step(batch).tolist())
        return scheduler

    def _step(self, batch: Batch) -> Tensor:
        on_gpu = self.device.type == "cuda"
        rows = self.sizes.at_once if on_gpu else max(2, len(batch.requests))  # 1 is a constant to compilers
        packed, total = batch.packed(rows, self.sizes.pages), len(batch.tokens) + rows - len(batch.requests)
        if not on_gpu or not batch.is_decoding:
            return self.mixed(*unpacked(packed.to(self.device), total, rows))
        if self._recorded is None:
            self._recorded = packed.to(self.device)
        self._recorded.copy_(packed)
        return self.decoding(*unpacked(self._recorded, total, rows))


def requests_of(sizes: Sizes) -> list[Request]:
    """Return requests with one beginning, of different lengths."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(1, sizes.vocabulary, (count,), generator=generator).tolist()

    def up_to(most: int) -> int:
        return int(torch.randint(most // 4, most + 1, (), generator=generator))

    shared = tokens(sizes.shared)
    return [
        Request(shared + tokens(up_to(sizes.longest_prompt)), up_to(sizes.longest_answer))
        for _ in range(sizes.requests)
    ]


# ---- transformers ----------------------------------------------------------------------------------------------------


def transformers_model(model: Llama, sizes: Sizes) -> Any:
    """Return transformers' model with the same weights; None if it is not installed."""
    try:
        import transformers
    except ImportError:
        print("transformers is not installed, and left out.")
        return None
    config = transformers.LlamaConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.width, intermediate_size=sizes.hidden, num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads, rms_norm_eps=1e-5, pad_token_id=0, eos_token_id=None,
        bos_token_id=None, max_position_embeddings=sizes.longest, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        peer = transformers.LlamaForCausalLM(config)
    size = sizes.width // sizes.heads
    weights = {"model.embed_tokens": model.tokens, "model.norm": model.norm, "lm_head": model.head}
    found = {f"{name}.weight": module.weight for name, module in weights.items()}
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        prefix = f"model.layers.{number}"
        q, k, v = layer.qkv.weight.split([sizes.width, sizes.kv_heads * size, sizes.kv_heads * size])
        gate, up = layer.gate_up.weight.chunk(2)
        found |= {f"{prefix}.self_attn.{name}_proj.weight": each for name, each in zip("qkv", (q, k, v), strict=True)}
        found |= {f"{prefix}.mlp.gate_proj.weight": gate, f"{prefix}.mlp.up_proj.weight": up}
        found |= {
            f"{prefix}.mlp.down_proj.weight": layer.down.weight,
            f"{prefix}.self_attn.o_proj.weight": layer.out.weight,
        }
        found |= {f"{prefix}.input_layernorm.weight": layer.norm.weight}
        found |= {f"{prefix}.post_attention_layernorm.weight": layer.mlp_norm.weight}
    peer.load_state_dict(found, assign=True)
    peer.model.rotary_emb = type(peer.model.rotary_emb)(config).to(model.cos.device)
    return peer.eval()


def in_batches(peer: Any, sizes: Sizes, backend: str | None) -> Callable[[Sequence[Request]], None]:
    """Return a function that draws all tokens by ``generate``: a batch runs until its longest answer ends."""
    import transformers

    how: dict[str, Any] = {"do_sample": False, "use_cache": True, "pad_token_id": 0}
    if backend is not None:
        mode = "reduce-overhead" if peer.device.type == "cuda" and backend == "inductor" else None
        compiled = transformers.CompileConfig(backend=backend, fullgraph=True, mode=mode)
        compiled._compile_all_devices = True  # it compiles for accelerators only, if not asked so
        how |= {"cache_implementation": "static", "compile_config": compiled, "max_cache_len": sizes.longest}

    def run(requests: Sequence[Request]) -> None:
        for first in range(0, len(requests), sizes.at_once):
            batch = requests[first : first + sizes.at_once]
            longest = max(each.prompt for each in batch)
            rows = [[0] * (longest - each.prompt) + each.tokens for each in batch]
            shown = [[0] * (longest - each.prompt) + [1] * each.prompt for each in batch]
            inputs, mask = (torch.tensor(each, device=peer.device) for each in (rows, shown))
            drawn = peer.generate(inputs, attention_mask=mask, max_new_tokens=max(each.wanted for each in batch), **how)
            for each, row in zip(batch, drawn[:, longest:].tolist(), strict=True):
                each.tokens += row[: each.wanted]

    return run


def by_continuous_batching(peer: Any, sizes: Sizes) -> Callable[[Sequence[Request]], None]:
    """Return a function that draws all tokens by transformers' own continuous batching."""
    import transformers

    config = transformers.GenerationConfig(
        do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=sizes.longest_answer
    )

    def run(requests: Sequence[Request]) -> None:
        manager = peer.init_continuous_batching(generation_config=config)
        manager.start()
        try:
            names = {manager.add_request(each.tokens, max_new_tokens=each.wanted): each for each in requests}
            while any(len(each.generated) < each.wanted for each in requests):
                result = manager.get_result(timeout=60)
                if result is None:
                    raise RuntimeError("continuous batching of transformers ended; its log says why")
                if result.is_finished():
                    each = names[result.request_id]
                    each.tokens += result.generated_tokens[: each.wanted]
        finally:
            manager.stop(block=True)

    return run


# ---- the table -------------------------------------------------------------------------------------------------------

CACHES = {"int8": torch.int8, "float8": torch.float8_e4m3fn}


@torch.inference_mode()
@torch._dynamo.config.patch(recompile_limit=16)  # two or three graphs for each kind of cache
def main(arguments: list[str] | None = None) -> list[Row]:
    """Return the table."""
    command = parser(__doc__, SIZES, "")
    command.add_argument("--variants", help="some of those of the table, by their numbers from 0, such as 0,3,4")
    options = parsed(command, arguments)
    sizes, device = SIZES[options.size], options.device
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    with torch.device(device):
        model = Llama(sizes).to(dtype).eval()
    model.cos, model.sin = model.cos.float(), model.sin.float()
    variants: dict[str, Callable[[Sequence[Request]], Any]] = {}
    peer = transformers_model(model, sizes)
    if peer is not None:
        variants |= {
            "transformers, batches": in_batches(peer, sizes, None),
            "transformers, batches, static cache, Inductor": in_batches(peer, sizes, "inductor"),
            "transformers, batches, static cache, opkit": in_batches(peer, sizes, "opkit"),
            "transformers, continuous batching": by_continuous_batching(peer, sizes),
        }
    variants |= {
        "pages, eager": Engine(model, sizes, dtype, None),
        "pages, opkit": Engine(model, sizes, dtype, "opkit"),
    }
    variants |= {f"pages of {name}, opkit": Engine(model, sizes, of, "opkit") for name, of in CACHES.items()}
    if options.variants is not None:
        names = [*variants]
        variants = {names[int(number)]: variants[names[int(number)]] for number in options.variants.split(",")}
    drawn: dict[str, list[list[int]]] = {}
    schedulers: dict[str, Scheduler] = {}

    def generated(name: str) -> None:
        requests = requests_of(sizes)
        found = variants[name](requests)
        drawn[name] = [each.generated for each in requests]
        if isinstance(found, Scheduler):
            schedulers[name] = found

    rows = measured({name: (lambda name=name: generated(name)) for name in variants}, device)
    requests = requests_of(sizes)
    count = sum(each.wanted for each in requests)
    prompts = sum(each.prompt for each in requests)
    print(
        f"{len(requests)} requests, {sizes.at_once} at once; {prompts} tokens of prompts, {count} drawn; {options.dtype}:\n"
    )
    print(table(rows, count))
    exact = {
        number: by_full_attention(model, requests[number]) for number in range(0, len(requests), len(requests) // 3)
    }
    for name, found in drawn.items():
        same = [_common(found[number], tokens) / len(tokens) for number, tokens in exact.items()]
        counted = schedulers.get(name)
        more = "" if counted is None else f"; at most {counted.pages.most_used} pages"
        print(f"{name}: the first {sum(same) / len(same):.0%} of an answer are what full attention draws{more}")
        if options.dtype == "float32" and "of" not in name.split():
            assert min(same) == 1, (name, same)
    return rows


def _common(found: list[int], expected: list[int]) -> int:
    """Return how many tokens agree, from the first on."""
    return next((n for n, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b), len(expected))


if __name__ == "__main__":
    main()
