"""Time steps of small models: as they are, after ``opkit.optimize(model, compile=False)``, and after ``opkit.optimize(model)``.

Each of the latter two runs in turns with the first; a ratio is the median of the ratios of one turn. Usage::

    python benchmarks/optimize.py [threads] [models]
"""

import copy
import functools
import sys

import torch
from torch import nn

import opkit
from opkit.bench.timing import compared

SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 1000}
BERT = {"intermediate_size": 1024}
LLAMA = {"intermediate_size": 768, "num_key_value_heads": 2}


class ViT(nn.Module):
    """A vision transformer of torch's own modules: 256 patches of 8 by 8 pixels."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 256, 8, 8)
        layer = nn.TransformerEncoderLayer(
            256, 4, 1024, dropout=0.0, batch_first=True, activation="gelu", norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 100)

    def forward(self, images):
        return self.head(self.encoder(self.patches(images).flatten(2).mT).mean(1))


def made(name, length):
    """Return a model and its inputs."""
    if name == "ViT":
        return ViT(), {"images": torch.randn(2, 3, 128, 128)}
    import transformers

    dropouts = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    config, model = {
        "Bert": (transformers.BertConfig(**SIZES, **BERT, **dropouts), transformers.BertModel),
        "Llama": (transformers.LlamaConfig(**SIZES, **LLAMA, use_cache=False), transformers.LlamaForCausalLM),
        "GPT-2": (
            transformers.GPT2Config(
                n_embd=256,
                n_layer=4,
                n_head=4,
                vocab_size=1000,
                attn_pdrop=0.0,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                use_cache=False,
            ),
            transformers.GPT2LMHeadModel,
        ),
    }[name]
    return model(config), {"input_ids": torch.randint(0, 1000, (2, length))}


def step(model, inputs, training):
    """Run a model once, or once forward and backward."""
    with torch.set_grad_enabled(training):
        out = model(**inputs)
        out = out if isinstance(out, torch.Tensor) else out[0]
    if training:
        out.square().mean().backward()
        model.zero_grad()


CASES = [("Bert", 128), ("Bert", 512), ("Llama", 128), ("Llama", 512), ("GPT-2", 128), ("GPT-2", 512), ("ViT", 256)]


def main(threads="1", *names):
    """Print a line for each model, length and kind of step."""
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    print("| model | step | as it is | `compile=False` | `optimize(model)` |\n| --- | --- | --- | --- | --- |")
    for name, length in CASES:
        if names and name not in names:
            continue
        plain, inputs = made(name, length)
        eager, compiled = copy.deepcopy(plain), copy.deepcopy(plain)
        opkit.optimize(eager, compile=False, verbose=False)
        opkit.optimize(compiled, verbose=False)
        for training in (False, True):
            calls = [
                functools.partial(step, each.train(training), inputs, training) for each in (plain, eager, compiled)
            ]
            for call in calls:
                call()
            found = [compared(calls[0], call, "cpu") for call in calls[1:]]
            kind = "training" if training else "inference"
            ratios = (f"{each.ratio:.2f}" for each in found)
            print(
                "|",
                " | ".join([f"{name}, {length} tokens", kind, f"{found[0].eager * 1e3:.1f} ms", *ratios]),
                "|",
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
