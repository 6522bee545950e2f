"""Building Triton kernels ahead of time: for which configurations, architectures and examples, with which tuning results."""

import dataclasses

import pytest
import torch
from packing import CONFIGS, OPTIONS, check

from opkit.errors import PackageError
from opkit.kernels import aot_package as manifests
from opkit.kernels.triton.binaries import Binary, Param
from opkit.kernels.tuning import records
from opkit.kernels.tuning.record_format import Tried
from opkit.op.triton.building import ARCHITECTURES

pytestmark = pytest.mark.usefixtures("triton_cache")


# ---- building --------------------------------------------------------------------------------------------------------


def test_each_config_is_built_for_each_architecture(pack):
    pack.write(CONFIGS)
    report = pack.build(["sm_90", "gfx942"])
    forms = [each.form for each in report.binaries]
    assert len(forms) == 2 * 2 * 3
    assert {(form.target, form.constexprs["BLOCK"], form.options.get("num_warps")) for form in forms} == {
        (target, *config) for target in ("sm_90", "gfx942") for config in (("int 64", None), ("int 128", "2"))
    }
    assert {each.file.rpartition(".")[2] for each in report.binaries} == {"cubin", "hsaco"}


def test_prune_decides_which_configs_are_built(pack):
    pack.write(f"{CONFIGS}, prune=lambda configs: configs[:1]")
    assert {each.form.constexprs["BLOCK"] for each in pack.build().binaries} == {"int 64"}


def test_architectures_by_default(pack):
    report = pack.build(())
    assert {each.form.target for each in report.binaries} == set(ARCHITECTURES)


def test_a_kernel_for_some_architectures(pack):
    pack.write(f'{OPTIONS}, targets=("sm_90a",)')
    assert {each.form.target for each in pack.build(()).binaries} == {"sm_90"}
    report = pack.build(["sm_80"])
    assert report.binaries == ()
    assert report.left_out == (f"{pack.name}::plus[add]: it is for sm_90 alone",)


def test_a_target_may_be_spelled_as_nvidia_does(pack, gpu):
    pack.write(f'{OPTIONS}, targets=("sm_90a",)')
    check(pack.fresh(), torch.randn(64), torch.randn(64))
    assert len(gpu.compiled) == 1


def test_without_examples_calls_are_made_up(pack):
    pack.write("BLOCK=128")
    assert {each.form.signature["x"] for each in pack.build().binaries} == {"*bf16", "*fp16", "*fp32"}


def test_files_of_the_last_build_are_removed(pack):
    pack.build(["sm_80", "sm_90"])
    (pack.built / "triton" / "mine.cubin").write_text("mine")
    pack.write(OPTIONS.replace("128", "256"))
    report = pack.build(["sm_90"])
    assert pack.files() == {"manifest.json", "triton/mine.cubin", *(each.file for each in report.binaries)}


def test_a_failure_writes_nothing(pack):
    pack.build()
    before = {name: (pack.built / name).read_bytes() for name in pack.files()}
    pack.write(edit=lambda text: text.replace("return value + SHIFT", "return value.nothing"))
    with pytest.raises(PackageError, match=r"(?s)Nothing was written.*plus\[add\].*sm_90.*ops\.py:\d+") as raised:
        pack.build()
    assert str(raised.value).count("could not be compiled") == 1
    assert {name: (pack.built / name).read_bytes() for name in pack.files()} == before


def test_a_config_that_cannot_be_compiled_is_left_out(pack):
    pack.write(CONFIGS, lambda text: text.replace("    at = ", "    tl.static_assert(BLOCK > 64)\n    at = "))
    report = pack.build()
    assert {each.form.constexprs["BLOCK"] for each in report.binaries} == {"int 128"}
    assert any("BLOCK=64" in line for line in report.left_out)


def test_an_example_that_cannot_be_made(pack):
    pack.write('BLOCK=128, examples=[{"x": "fp32[8]"}]')
    with pytest.raises(PackageError, match=r"(?s)no example of \S+::plus\[add\] could.*y is missing"):
        pack.build()


# ---- tuning results --------------------------------------------------------------------------------------------------


def identity_of(ops):
    (kernel,) = ops.plus._operator.kernels.kernels
    return kernel.function.identities()[0], kernel.function.kernel.configs


def test_tuning_results_come_along(pack, tmp_path, settings):
    pack.write(CONFIGS)
    identity, configs = identity_of(pack.fresh())
    tried = [Tried(each.to_json(), ms) for each, ms in zip(configs, (2.0, 1.0), strict=True)]
    records.remember(identity, "NVIDIA H200", "bucket", tried)
    records.remember(dataclasses.replace(identity, hash="old"), "NVIDIA A100", "bucket", tried)
    assert pack.build().tuned == 1
    settings(cache_dir=tmp_path / "another")
    folders = records.packaged(f"{pack.name}.ops")
    assert records.lookup(identity, configs, "NVIDIA H200", "bucket", folders).config == configs[1]
    assert records.lookup(identity, configs, "NVIDIA A100", "bucket", folders).config is None


def test_results_that_lie_there_stay(pack, tmp_path, settings):
    test_tuning_results_come_along(pack, tmp_path, settings)
    assert pack.build().tuned == 0  # the cache is an empty one now
    assert len(list((pack.built / "tuning").iterdir())) == 1


def test_without_tuning_results(pack):
    pack.write(CONFIGS)
    identity, configs = identity_of(pack.fresh())
    records.remember(identity, "NVIDIA H200", "bucket", [Tried(configs[0].to_json(), 1.0)])
    assert pack.build(with_tuning=False).tuned == 0
    assert not (pack.built / "tuning").exists()


def test_what_is_read_back_is_what_was_built(pack):
    pack.build()
    for each in manifests.read(pack.built).binaries:
        image = (pack.built / each.file).read_bytes()
        assert Binary.from_json(each.launch, image).params[:4] == (
            *(Param("ptr", n) for n in ("x", "y", "out")),
            Param("i32", "n"),
        )
