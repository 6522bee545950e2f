"""Models of ``timm``: the 61 of torch 2.0's list, all of which today's timm has, some under new names that it maps itself."""

from __future__ import annotations

import functools
from typing import Any

from opkit.bench.architecture import Architecture, Size, Task, images, package, without_dropout

_NAMES = """
adv_inception_v3 beit_base_patch16_224 botnet26t_256 cait_m36_384 coat_lite_mini convit_base convmixer_768_32 convnext_base
crossvit_9_240 cspdarknet53 deit_base_distilled_patch16_224 dla102 dm_nfnet_f0 dpn107 eca_botnext26ts_256 eca_halonext26ts
ese_vovnet19b_dw fbnetc_100 fbnetv3_b gernet_l ghostnet_100 gluon_inception_v3 gmixer_24_224 gmlp_s16_224 hrnet_w18 inception_v3
jx_nest_base lcnet_050 levit_128 mixer_b16_224 mixnet_l mnasnet_100 mobilenetv2_100 mobilenetv3_large_100 mobilevit_s nfnet_l0
pit_b_224 pnasnet5large poolformer_m36 regnety_002 repvgg_a2 res2net101_26w_4s res2net50_14w_8s res2next50 resmlp_12_224
resnest101e
rexnet_100
sebotnet33ts_256 selecsls42b spnasnet_100 swin_base_patch4_window7_224 swsl_resnext101_32x16d tf_efficientnet_b0
tf_mixnet_l tinynet_a tnt_s_patch16_224 twins_pcpvt_base visformer_small vit_base_patch16_224 volo_d1_224 xcit_large_24_p8_224
"""

_CLASSES = 10
_TINY_SIDE = 64

# Images of other sides, where the network has too many strides for 64, or its windows need a multiple.
_SIDES = {
    **dict.fromkeys(["adv_inception_v3", "gluon_inception_v3", "inception_v3"], 96),
    **dict.fromkeys(["eca_halonext26ts"], 256),
    **dict.fromkeys(["crossvit_9_240"], 240),
    **dict.fromkeys(["coat_lite_mini", "levit_128"], 224),
}

_VIT = {"img_size": 64, "embed_dim": 64, "depth": 2, "num_heads": 4}
_SIDE = {"img_size": 64}
_RESNET = {"layers": (1, 1, 1, 1)}

_FIXED = """
botnet26t_256 eca_botnext26ts_256 gmixer_24_224 gmlp_s16_224 jx_nest_base mixer_b16_224 resmlp_12_224 sebotnet33ts_256
visformer_small volo_d1_224
"""

# What makes models tiny that are slow on CPUs: fewer and narrower layers.
_TINY: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ["beit_base_patch16_224", "deit_base_distilled_patch16_224", "vit_base_patch16_224", "convit_base"], _VIT
    ),
    **dict.fromkeys(
        ["res2net101_26w_4s", "res2net50_14w_8s", "res2next50", "resnest101e", "swsl_resnext101_32x16d"], _RESNET
    ),
    **dict.fromkeys(_FIXED.split(), _SIDE),
    "cait_m36_384": _VIT,
    "convnext_base": {"depths": (1, 1, 2, 1), "dims": (32, 48, 64, 96)},
    "pit_b_224": {"img_size": 64, "base_dims": (16, 16, 16), "depth": (1, 1, 1), "heads": (2, 4, 8)},
    "swin_base_patch4_window7_224": {
        "img_size": 64,
        "embed_dim": 32,
        "depths": (2, 2, 2, 1),
        "num_heads": (1, 2, 4, 8),
    },
    "tnt_s_patch16_224": {"img_size": 64, "embed_dim": 64, "depth": 2, "num_heads_outer": 4},
    "twins_pcpvt_base": {
        "img_size": 64,
        "embed_dims": (32, 64, 96, 128),
        "depths": (1, 1, 1, 1),
        "num_heads": (1, 2, 3, 4),
    },
    "xcit_large_24_p8_224": _VIT,
}

_REAL_BATCH, _SMALL_BATCHES = 32, {"cait_m36_384": 8}  # 32 of these in float64 take more than 139 GiB


def build(name: str, size: Size) -> Task:
    """Return the task of a model; real images have the side that its authors used."""
    more = _TINY.get(name, {}) if size == "tiny" else {}
    module = package("timm").create_model(name, pretrained=False, num_classes=_CLASSES, **more)
    side = module.default_cfg["input_size"][-1] if size == "real" else _SIDES.get(name, _TINY_SIDE)
    return Task(without_dropout(module), images(side), 4 if size == "tiny" else _SMALL_BATCHES.get(name, _REAL_BATCH))


ARCHITECTURES = [Architecture(name, "timm", functools.partial(build, name), ("timm",)) for name in _NAMES.split()]
