"""Models of transformers with attn_implementation="opkit", beside their own implementation in torch operations."""

import copy

import pytest
import torch

import opkit

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
