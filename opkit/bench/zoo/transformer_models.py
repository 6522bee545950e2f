"""Models of ``transformers``, from configurations: those of torch's benchmarks, and language models that it added later.

The list is benchmarks/dynamo/huggingface_models_list.txt of pytorch, with the class where it names a checkpoint, and without
T5Small, which is T5ForConditionalGeneration with another configuration.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from opkit.bench.architecture import Architecture, Size, Task, package, without_dropout

# Those of torch 2.0's list: 46.
_NAMES = """
AlbertForMaskedLM AlbertForQuestionAnswering LongformerForMaskedLM BartForCausalLM BartForConditionalGeneration BertForMaskedLM
BertForQuestionAnswering BlenderbotForCausalLM BlenderbotForConditionalGeneration BlenderbotSmallForCausalLM
BlenderbotSmallForConditionalGeneration CamembertForMaskedLM DebertaForMaskedLM DebertaForQuestionAnswering DebertaV2ForMaskedLM
DebertaV2ForQuestionAnswering DistilBertForMaskedLM DistilBertForQuestionAnswering GPT2LMHeadModel ElectraForCausalLM
ElectraForQuestionAnswering GPT2ForSequenceClassification FNetForMaskedLM LayoutLMForMaskedLM LayoutLMForSequenceClassification
M2M100ForConditionalGeneration MBartForCausalLM MBartForConditionalGeneration MT5ForConditionalGeneration MegatronBertForCausalLM
MegatronBertForQuestionAnswering MobileBertForMaskedLM MobileBertForQuestionAnswering OPTForCausalLM PLBartForCausalLM
PLBartForConditionalGeneration PegasusForCausalLM PegasusForConditionalGeneration RobertaForCausalLM RobertaForQuestionAnswering
Speech2TextForConditionalGeneration T5ForConditionalGeneration TrOCRForCausalLM XGLMForCausalLM XLNetLMHeadModel
ConvBertForMaskedLM
"""

# Those that were added to it since.
_LATER = """
GPTJForCausalLM GPTJForQuestionAnswering GPTNeoForCausalLM GPTNeoForSequenceClassification LlamaForCausalLM Gemma2ForCausalLM
Gemma3ForCausalLM WhisperForConditionalGeneration Qwen3ForCausalLM MistralForCausalLM GptOssForCausalLM
"""

# In torch's list under another name, or not in today's transformers.
_SUBSTITUTES = {
    "LongformerForMaskedLM": "AllenaiLongformerBase",
    "CamembertForMaskedLM": "CamemBert",
    "GPT2LMHeadModel": "DistillGPT2",
    "FNetForMaskedLM": "GoogleFnet",
    "Speech2TextForConditionalGeneration": "Speech2Text2ForCausalLM",
    "ConvBertForMaskedLM": "YituTechConvBert",
}

_TINY: dict[str, Any] = {
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"], 32),
    **dict.fromkeys(
        ["intermediate_size", "d_ff", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_inner", "n_inner"], 64
    ),
    **dict.fromkeys(["d_kv", "d_head", "head_dim"], 8),
    **dict.fromkeys(
        ["num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"],
        4,
    ),
    **dict.fromkeys(["vocab_size", "max_position_embeddings", "n_positions"], 128),
    "num_key_value_heads": 2,
    "rotary_dim": 4,
    "conv_channels": 32,
    "max_source_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 3,
    "decoder_start_token_id": 1,
}
_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
)
_MAX_LAYERS = {"tiny": 2, "real": 12}
_MAX_WIDE_LAYERS = 4
"""Of real sizes that are wider than 2,048, so that a copy in float64 fits in a GPU's memory with them."""

# What a tiny configuration needs besides; by the beginning of the name.
_TINY_MORE: dict[str, dict[str, Any]] = {
    "GPTNeoFor": {"attention_types": [[["global", "local"], 1]]},
    "MobileBert": {"intra_bottleneck_size": 32, "true_hidden_size": 32},
    "Longformer": {"attention_window": [8, 8]},
    "ConvBert": {"head_ratio": 2, "num_groups": 1, "conv_kernel_size": 3},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
_REAL_MORE: dict[str, dict[str, Any]] = {
    "GPTNeoFor": {"attention_types": [[["global", "local"], 6]]},
    "Longformer": {"attention_window": [512] * 12, "max_position_embeddings": 514},  # behind that of padding, too
    "GptOss": {"num_local_experts": 8},
    "Blenderbot": {"max_position_embeddings": 512},
    "Camembert": {"max_position_embeddings": 514},
    "Roberta": {"max_position_embeddings": 514},
    "GPT2ForSequenceClassification": {"pad_token_id": 0},
    "GPTNeoForSequenceClassification": {"pad_token_id": 0},
}


def build(name: str, size: Size) -> Task:
    """Return the task of a class of transformers; real sizes are those of its default configuration, with 12 layers at most."""
    cls = getattr(package("transformers"), name)
    module = cls(_configuration(cls, name, size))
    if getattr(module, "loss_type", "") is None:
        module.loss_type = "ForCausalLM"  # else the forward logs a warning, which breaks the graph
    _remove_dropout(module)
    batch, length = (2, 24) if size == "tiny" else (8, 512)
    inputs = functools.partial(_inputs, module, length)
    return Task(module, inputs, batch, functools.partial(_with_labels, module, inputs))


def _configuration(cls: Any, name: str, size: Size) -> Any:
    default = cls.config_class()
    known = vars(default).keys() | set(default.attribute_map)
    values: dict[str, Any] = {key: value for key, value in _TINY.items() if key in known} if size == "tiny" else {}
    width = getattr(default, "hidden_size", 0)
    layers = _MAX_WIDE_LAYERS if size == "real" and width > 2048 else _MAX_LAYERS[size]
    for key in set(_LAYERS) & known:
        values[key] = min(layers, getattr(default, key))
    for begin, more in (_TINY_MORE if size == "tiny" else _REAL_MORE).items():
        values |= more if name.startswith(begin) else {}
    if "layer_types" in known and default.layer_types:
        values["layer_types"] = _layer_types(default.layer_types, min(layers, len(default.layer_types)))
    if "use_cache" in known:
        values["use_cache"] = False
    return cls.config_class(**values)


def _layer_types(every: list[str], count: int) -> list[str]:
    """Return the types of a shorter stack, which has every type."""
    kinds = list(dict.fromkeys(every))
    return [*every[: count - len(kinds)], *kinds]


def _remove_dropout(module: nn.Module) -> None:
    without_dropout(module)
    for each in module.modules():
        config = getattr(each, "config", None)
        for name in [*vars(config)] if config is not None else ():
            if ("dropout" in name or name.endswith(("pdrop", "layerdrop"))) and isinstance(
                getattr(config, name), float
            ):
                setattr(config, name, 0.0)


def _inputs(module: Any, length: int, batch: int) -> dict[str, Any]:
    config, names = module.config, inspect.signature(module.forward).parameters
    vocabulary = getattr(config, "vocab_size", 128)
    tokens = torch.randint(4, vocabulary, (batch, length))
    if "input_features" in names:
        bins, frames = getattr(config, "num_mel_bins", 0), 2 * config.max_source_positions
        shape = (bins, frames) if bins else (min(frames, 4 * length), config.input_feat_per_channel)
        return {
            "input_features": torch.randn(batch, *shape),
            "decoder_input_ids": tokens[:, : config.max_target_positions],
        }
    inputs: dict[str, Any] = {"input_ids": tokens}
    if "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = tokens.roll(1, 1)
    if "attention_mask" in names:
        inputs["attention_mask"] = torch.ones(batch, length, dtype=torch.long)
        inputs["attention_mask"][1:, length - length // 6 :] = 0
    if "bbox" in names:
        inputs["bbox"] = torch.zeros(batch, length, 4, dtype=torch.long)
    return inputs


def _with_labels(module: Any, make: Any, batch: int) -> dict[str, Any]:
    inputs, name = make(batch), type(module).__name__
    tokens = inputs["input_ids"] if "input_ids" in inputs else inputs["decoder_input_ids"]
    if name.endswith("QuestionAnswering"):
        begins = torch.randint(0, tokens.shape[1] // 2, (batch,))
        return inputs | {"start_positions": begins, "end_positions": begins + 3}
    if name.endswith("SequenceClassification"):
        return inputs | {"labels": torch.randint(0, module.config.num_labels, (batch,))}
    return inputs | {"labels": tokens}


ARCHITECTURES = [
    Architecture(name, "transformers", functools.partial(build, name), ("transformers",), _SUBSTITUTES.get(name, ""))
    for name in (*_NAMES.split(), *_LATER.split())
]
