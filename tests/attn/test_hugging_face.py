"""Models of transformers with attn_implementation="opkit", beside their own implementation in torch operations."""

import copy

import pytest
import torch
from attention_inputs import seen

import opkit
from opkit.attn.compat import hugging_face
from opkit.attn.masks.sequences import KeyPadding

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50}


def models(kind, **config):
    """The same weights with transformers' own attention and opkit's."""
    opkit.register_transformers()
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}Config")(**SMALL, **config)
    made._attn_implementation = "eager"
    eager = getattr(transformers, f"{kind}ForCausalLM")(made).eval()
    mine = copy.deepcopy(eager)
    mine.set_attn_implementation("opkit")
    return eager, mine


LLAMA = {"num_key_value_heads": 2, "intermediate_size": 64}
KINDS = {
    "Llama": LLAMA,
    "Mistral": {**LLAMA, "sliding_window": 3},
    "Gemma2": {**LLAMA, "head_dim": 8, "sliding_window": 3, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
}


@pytest.mark.parametrize("kind", KINDS)
def test_padded_batches(kind):
    eager, mine = models(kind, **KINDS[kind])
    tokens = torch.randint(0, 50, (2, 7))
    padding = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    with torch.no_grad():
        found, expected = (model(tokens, attention_mask=padding).logits for model in (mine, eager))
    torch.testing.assert_close(found[padding.bool()], expected[padding.bool()], rtol=1e-4, atol=1e-5)
    found, expected = (model(tokens, labels=tokens).loss for model in (mine, eager))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_generation_with_a_cache(kind):
    eager, mine = models(kind, **KINDS[kind])
    tokens, padding = torch.randint(1, 50, (2, 4)), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    how = {"attention_mask": padding, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(*(model.generate(tokens, **how) for model in (mine, eager)))


def test_generation_with_a_static_cache():
    eager, mine = models("Llama", **LLAMA)
    tokens, padding = torch.randint(1, 50, (2, 4)), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    how = {"attention_mask": padding, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    how |= {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(*(model.generate(tokens, **how) for model in (mine, eager)))


def test_prefill_in_chunks():
    eager, mine = models("Mistral", **KINDS["Mistral"])
    tokens, found = torch.randint(1, 50, (2, 9)), {}
    for name, model in (("eager", eager), ("mine", mine)):
        cache, logits = transformers.DynamicCache(config=model.config), []
        with torch.no_grad():
            for part in tokens.split(4, 1):
                logits.append(model(part, past_key_values=cache, use_cache=True).logits)
        found[name] = torch.cat(logits, 1)
    torch.testing.assert_close(found["mine"], found["eager"], rtol=1e-4, atol=1e-5)


def test_packed_sequences():
    eager, mine = models("Llama", **LLAMA)
    tokens, positions = torch.randint(1, 50, (1, 9)), torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]])
    with torch.no_grad():
        found, expected = (model(tokens, position_ids=positions, use_cache=False).logits for model in (mine, eager))
        alone = mine(tokens[:, 4:6], use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[:, 4:6], alone, rtol=1e-4, atol=1e-5)


def test_an_encoder():
    opkit.register_transformers()
    config = transformers.BertConfig(**SMALL, intermediate_size=64)
    config._attn_implementation = "eager"
    eager = transformers.BertModel(config).eval()
    mine = copy.deepcopy(eager)
    mine.set_attn_implementation("opkit")
    tokens, padding = torch.randint(0, 50, (2, 7)), torch.tensor([[1] * 7, [1, 1, 1, 1, 0, 0, 0]])
    for mask in (None, padding):
        with torch.no_grad():
            found, expected = (model(tokens, attention_mask=mask).last_hidden_state for model in (mine, eager))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_compiled_model():
    eager, mine = models("Mistral", **KINDS["Mistral"])
    tokens, padding = torch.randint(1, 50, (2, 7)), torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    torch.compiler.reset()
    with torch.no_grad():
        found = torch.compile(mine, backend="aot_eager")(tokens, attention_mask=padding, use_cache=False).logits
        expected = eager(tokens, attention_mask=padding, use_cache=False).logits
    torch.testing.assert_close(found[padding.bool()], expected[padding.bool()], rtol=1e-4, atol=1e-5)


# ---- masks -----------------------------------------------------------------------------------------------------------

BATCH = 3


def functions(masks):
    """Mask functions that transformers makes, and others."""
    left = torch.tensor([0, 2, 5])
    groups = torch.tensor([[-1, 0, 0, -1, 1, 1, 1, -1, -1, 2, 2, -1]] * BATCH)
    causal, both = masks.causal_mask_function, masks.bidirectional_mask_function
    return {
        "causal": causal,
        "both": both,
        "window": masks.sliding_window_causal_mask_function(3),
        "window both ways": masks.sliding_window_bidirectional_mask_function(2),
        "chunks": masks.chunked_causal_mask_function(4, left),
        "groups": masks.or_masks(causal, masks.blockwise_overlay(groups)),
        "another": masks.and_masks(causal, lambda b, h, q, k: k % 2 == 0),
        "another's": lambda b, h, q, k: k <= q,
    }


PADDINGS = {
    "none": None,
    "no padding": [[1] * 12] * BATCH,
    "right": [[1] * 12, [1] * 7 + [0] * 5, [0] * 12],
    "left": [[1] * 12, [0] * 5 + [1] * 7, [0] * 11 + [1]],
    "holes": [[1, 0] * 6, [0] * 3 + [1] * 5 + [0] * 4, [1] * 12],
}
PLACES = [(12, 12, 0, 0), (5, 12, 7, 0), (1, 12, 11, 0), (4, 6, 8, 6), (4, 12, 0, 0), (4, 7, 3, 2)]


def dense(given, queries, keys):
    """What a mask lets queries see."""
    if isinstance(given, hugging_face.Prepared):
        return seen(given.mask, BATCH, 1, queries, keys)
    given = torch.ones(1, dtype=torch.bool) if given is None else given
    return given.expand(BATCH, 1, queries, keys)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_mask_functions(place, padding):
    from transformers import masking_utils as masks

    queries, keys, q_offset, kv_offset = place
    given = None if PADDINGS[padding] is None else torch.tensor(PADDINGS[padding]).bool()
    for name, function in functions(masks).items():
        call = {
            "batch_size": BATCH,
            "q_length": queries,
            "kv_length": keys,
            "q_offset": q_offset,
            "kv_offset": kv_offset,
        }
        call |= {"mask_function": function, "attention_mask": given, "allow_is_causal_skip": False}
        found, expected = hugging_face.mask_interface(**call), masks.sdpa_mask(**call)
        assert isinstance(found, hugging_face.Prepared), name
        assert torch.equal(dense(found, queries, keys), dense(expected, queries, keys)), name


def packed(masks, inner, positions, sequences):
    """What transformers makes of a mask function for packed sequences; older ones, such as 5.18, ask it of places alone."""
    if hasattr(masks, "packed_sequence_compatibility_function"):
        return masks.packed_sequence_compatibility_function(inner, positions, sequences)
    return masks.and_masks(inner, masks.packed_sequence_mask_function(sequences))


def test_packed_mask_functions():
    from transformers import masking_utils as masks

    sequences = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]] * BATCH)
    consecutive = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]] * BATCH)
    chunks = masks.chunked_causal_mask_function(2, torch.zeros(BATCH, dtype=torch.int64))
    of_distance = (masks.causal_mask_function, masks.sliding_window_causal_mask_function(2))
    cases = [(inner, positions) for inner in (*of_distance, chunks) for positions in (consecutive, consecutive * 2)]
    for inner, positions in cases:
        call = {"batch_size": BATCH, "q_length": 8, "kv_length": 8, "q_offset": 0, "kv_offset": 0}
        call |= {"mask_function": packed(masks, inner, positions, sequences), "allow_is_causal_skip": False}
        found = hugging_face.mask_interface(**call)
        assert isinstance(found, hugging_face.Prepared)
        assert torch.equal(dense(found, 8, 8), masks.sdpa_mask(**call))


def test_right_padding_is_a_length():
    from transformers import masking_utils as masks

    call = {"batch_size": 2, "q_length": 4, "kv_length": 4, "q_offset": 0, "kv_offset": 0}
    padding = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    found = hugging_face.mask_interface(**call, mask_function=masks.causal_mask_function, attention_mask=padding)
    assert isinstance(found.mask.parts[1], KeyPadding)


def test_a_mask_of_more_keys_than_there_are():
    prepared = hugging_face.Prepared(opkit.masks.Causal(), (1, 1, 4, 9))
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
    found = opkit.attention(q, k, k, mask=hugging_face.fitted(prepared, q, k))
    torch.testing.assert_close(found, opkit.attention(q, k, k, mask=opkit.masks.Causal()))


@pytest.mark.parametrize("padded", ["left", "right", "none"])
def test_no_matrix_is_made(padded):
    from torch.utils._python_dispatch import TorchDispatchMode

    length, largest = 1024, []
    _, mine = models("Mistral", **{**KINDS["Mistral"], "sliding_window": 100, "max_position_embeddings": length})

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            largest.extend(x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor))
            return out

    padding = torch.ones(2, length, dtype=torch.int64)
    padding[1, slice(0, 300) if padded == "left" else slice(700, None)] = 0
    with torch.no_grad(), Note():
        mine(torch.randint(0, 50, (2, length)), attention_mask=None if padded == "none" else padding, use_cache=False)
    assert max(largest) < length * length // 4
