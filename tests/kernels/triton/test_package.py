"""Triton kernels built ahead of time: which binary serves a call, and what is compiled after all."""

import shutil
import sys
import warnings

import pytest
import torch
from packing import BY_PYTHON, OPTIONS, check, divisible

from opkit.errors import BuildCacheWarning

pytestmark = pytest.mark.usefixtures("triton_cache")


# ---- which binary ----------------------------------------------------------------------------------------------------


def test_a_call_like_the_example_needs_no_compiler(pack, gpu, no_compiler):
    report = pack.build()
    assert len(report.binaries) == 3
    assert report.left_out == ()
    no_compiler()
    check(pack.fresh(), torch.randn(320), torch.randn(320))
    assert divisible(gpu) == ("n", "out", "x", "y")


def test_the_binary_that_was_told_the_most_is_taken(pack, gpu, no_compiler):
    pack.build()
    no_compiler()
    for x, expected in (
        (torch.randn(4096), ("n", "out", "x", "y")),
        (torch.randn(333), ("out", "x", "y")),
        (torch.randn(1), ("out", "x", "y")),
        (torch.randn(321)[1:], ()),
        (torch.randn(2)[1:], ()),
    ):
        check(pack.fresh(), x, x)
        assert divisible(gpu) == expected, (x.shape, x.storage_offset())


def test_one_binary_is_loaded_once(pack, gpu, fake, no_compiler):
    pack.build()
    no_compiler()
    ops = pack.fresh()
    for size in (333, 1, 321):
        check(ops, torch.randn(size), torch.randn(size))
    assert len(fake.noted("load")) == 1


def test_a_package_can_be_moved(pack, gpu, no_compiler, tmp_path, monkeypatch):
    pack.build()
    pack.forget()
    (tmp_path / "site").mkdir()
    pack.place = pack.place.rename(tmp_path / "site" / pack.name)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    no_compiler()
    check(pack.fresh(), torch.randn(64), torch.randn(64))


def test_a_later_gpu_of_the_same_generation_runs_what_was_built_for_an_older(pack, gpu, no_compiler):
    pack.build(["sm_80", "sm_90"])
    no_compiler()
    gpu.target = "sm_86"
    check(pack.fresh(), torch.randn(64), torch.randn(64))
    assert gpu.found[-1].form.target == "sm_80"


def test_without_a_package_the_kernel_is_compiled(pack, gpu):
    check(pack.fresh(), torch.randn(64), torch.randn(64))
    assert len(gpu.compiled) == 1


def test_kernels_that_python_launches(pack, gpu, no_compiler):
    pack.write(edit=lambda text: text + BY_PYTHON.replace("NAME", pack.name))
    report = pack.build()
    assert {each.operator for each in report.binaries} == {f"{pack.name}::plus", "add"}
    no_compiler()
    x = torch.randn(333)
    torch.testing.assert_close(pack.fresh().thrice(x), 3 * x)
    assert gpu.found[-1].operator == "add"
    assert divisible(gpu) == ("out", "x", "y")


def test_what_python_does_may_need_numbers(pack):
    needs_numbers = BY_PYTHON.replace("    return second", "    return second if x.sum().item() else second")
    pack.write(edit=lambda text: text + needs_numbers.replace("NAME", pack.name))
    report = pack.build()
    (note,) = report.left_out
    assert note.startswith(f"{pack.name}::thrice[two_launches]: its launches are compiled when they are made: ")


# ---- what is compiled after all --------------------------------------------------------------------------------------


def compiled_with(pack, gpu, match, size=64, dtype=torch.float32):
    ops = pack.fresh()
    gpu.compiled.clear()
    with pytest.warns(BuildCacheWarning, match=match) as said:
        ops.plus(torch.ones(size, dtype=dtype), torch.ones(size, dtype=dtype))
    assert len(said) == 1
    assert len(gpu.compiled) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pack.fresh().plus(torch.ones(2 * size + 1, dtype=dtype), torch.ones(2 * size + 1, dtype=dtype))  # said once
    return str(said[0].message)


def test_a_call_that_was_not_foreseen(pack, gpu):
    pack.build()
    said = compiled_with(pack, gpu, "was not built for a call like this one", dtype=torch.int32)
    assert "x: *i32, y: *i32, out: *i32, n: i32, BLOCK=128" in said
    assert "examples= would cover" in said
    assert f"opkit build {pack.name}` again" in said


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace("constexpr(0)", "constexpr(1)"),
        lambda text: text.replace("return value + SHIFT", "return value - SHIFT"),
        lambda text: text.replace("tl.program_id(0) * BLOCK", "BLOCK * tl.program_id(0)"),
    ],
    ids=["constant", "callee", "kernel"],
)
def test_an_edited_source(pack, gpu, edit):
    pack.build()
    pack.write(edit=edit)
    compiled_with(pack, gpu, r"plus, kernel 'add', was edited since it was built")


def test_another_constexpr_or_option(pack, gpu):
    pack.build()
    pack.write(OPTIONS.replace("128", "128, num_warps=8"))
    compiled_with(pack, gpu, "BLOCK=128, num_warps=8")


def test_an_architecture_that_was_not_built(pack, gpu):
    pack.build(["sm_80", "sm_90"])
    gpu.target = "sm_100"
    compiled_with(pack, gpu, "was built for sm_80, sm_90, and this GPU is sm_100")


def test_a_damaged_binary(pack, gpu):
    pack.build()
    for path in (pack.built / "triton").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    compiled_with(pack, gpu, r"cubin is not what was built: its sha256 differs")


def test_a_missing_binary(pack, gpu):
    pack.build()
    shutil.rmtree(pack.built / "triton")
    compiled_with(pack, gpu, r"No such file or directory")


@pytest.mark.parametrize(
    "edit",
    [
        lambda manifest: manifest["triton"][0].update(file="../../ops.py"),
        lambda manifest: manifest["triton"][0].pop("form"),
        lambda manifest: manifest["triton"][0].update(form=[]),
    ],
)
def test_a_damaged_manifest(pack, gpu, edit):
    pack.build()
    pack.change(edit)
    compiled_with(pack, gpu, r"manifest\.json cannot be read")


def test_a_binary_whose_launch_is_unknown(pack, gpu):
    pack.build()
    pack.change(lambda manifest: [item["launch"].pop("cluster") for item in manifest["triton"]])
    compiled_with(pack, gpu, r"manifest\.json does not say how it is launched")


def test_a_binary_that_needs_more_shared_memory_than_there_is(pack, gpu):
    pack.build()
    pack.change(lambda manifest: [item["launch"].update(shared=10**6) for item in manifest["triton"]])
    compiled_with(pack, gpu, "was not built for a call like this one")
