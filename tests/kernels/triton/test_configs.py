"""Configurations: read from dictionaries and ``triton.Config``, told apart, written to JSON, pruned."""

import enum
import json
import re

import pytest
import triton
import triton.language as tl

from opkit.errors import DeclarationError, KernelError
from opkit.kernels.tuning.configs import Config, key_of, label_of, option_names, prune

PARAMETERS = ["x", "out", "BLOCK", "TYPE", "ACTIVATION"]


class Mode(enum.Enum):
    FAST = 1


@triton.jit
def silu(x):
    return x


def parse(given):
    return Config.parse(given, PARAMETERS)


def test_names_of_parameters_are_constexprs_and_others_options():
    config = parse({"BLOCK": 128, "num_warps": 4, "waves_per_eu": 2})
    assert config.constexprs == {"BLOCK": 128}
    assert config.options == {"num_warps": 4, "waves_per_eu": 2}
    assert config.label == "BLOCK=128, num_warps=4, waves_per_eu=2"


def test_a_triton_config():
    hook = print
    config = parse(triton.Config({"BLOCK": 64, "waves_per_eu": 1}, num_warps=8, num_stages=2, pre_hook=hook))
    assert config.constexprs == {"BLOCK": 64}
    assert config.options == {"waves_per_eu": 1, "num_warps": 8, "num_stages": 2, "num_ctas": 1}
    assert config.pre_hook is hook


def test_what_is_none_of_both_is_refused_with_the_nearest_name():
    with pytest.raises(DeclarationError, match=r"'BLOK' in .* neither a parameter .* Did you mean BLOCK"):
        parse({"BLOK": 128})
    with pytest.raises(DeclarationError, match=r"'num_warp' .* Did you mean num_warps"):
        parse({"num_warp": 4})


def test_what_is_no_configuration():
    for given, reason in (
        (128, "is no configuration"),
        ([("BLOCK", 1)], "is no configuration"),
        ({128: 4}, "128 in .* is no name"),
        ({"BLOCK": 1, "pre_hook": 3}, "pre_hook .* cannot be called"),
        ({"ACTIVATION": lambda x: x}, "has no name"),
        ({"ACTIVATION": object()}, "has no name"),
    ):
        said = None
        try:
            parse(given)
        except DeclarationError as error:
            said = str(error)
        assert re.search(reason, str(said)), given


def test_values_are_told_apart_in_json():
    values = [1, 1.0, True, "1", None, tl.bfloat16, tl.float16, silu, Mode.FAST, (1, 2), float("inf")]
    configs = [parse({"TYPE": value}) for value in values]
    assert len({config.key for config in configs}) == len(values)
    for config in configs:
        assert key_of(json.loads(json.dumps(config.to_json()))) == config.key
        assert label_of(config.to_json()) == config.label


def test_equal_configurations_are_equal():
    one, other = parse({"BLOCK": 64, "num_warps": 4}), parse({"num_warps": 4, "BLOCK": tl.constexpr(64)})
    assert one == other
    assert len({one, other, parse({"BLOCK": 64})}) == 2
    assert one != "BLOCK=64, num_warps=4"


def test_options_of_the_installed_triton():
    assert {"num_warps", "num_stages", "num_ctas", "maxnreg", "waves_per_eu"} <= option_names()


CONFIGS = [parse({"BLOCK": block, "num_warps": warps}) for block in (64, 256) for warps in (4, 8)]


def test_pruning_by_name():
    kept = prune(CONFIGS, lambda configs, d: [c for c in configs if c["BLOCK"] <= d], {"d": 100, "batch": 3})
    assert kept == CONFIGS[:2]
    assert prune(CONFIGS, lambda configs: [{"BLOCK": 256, "num_warps": 8}], {}) == CONFIGS[3:]
    assert prune(CONFIGS, None, {}) == CONFIGS
    assert prune(CONFIGS, lambda configs, d=7: configs[:d], {}) == CONFIGS


def test_pruning_as_triton_does():
    def early_config_prune(configs, named_args, **kwargs):
        assert named_args["d"] == kwargs["d"] == 100
        return [c for c in configs if c.kwargs["BLOCK"] <= kwargs["d"] and c.num_warps == 8]

    given = [*CONFIGS, parse(triton.Config({"BLOCK": 32}, num_warps=8))]
    assert prune(given, early_config_prune, {"d": 100}) == [CONFIGS[1], given[-1]]


@pytest.mark.parametrize(
    ("function", "error", "reason"),
    [
        (lambda configs, rows: configs, DeclarationError, "takes rows, .* may take d"),
        (lambda configs: [], KernelError, r"left none of the configs \(for d=100\)"),
        (lambda configs: None, KernelError, "returned None, which is no list"),
        (lambda configs: [{"BLOCK": 7}], KernelError, "returned {'BLOCK': 7}, which is none of"),
    ],
)
def test_mistakes_in_pruning(function, error, reason):
    with pytest.raises(error, match=reason):
        prune(CONFIGS, function, {"d": 100})
