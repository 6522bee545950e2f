"""Triton kernels built ahead of time: which binary serves a call, and what is compiled after all."""

import dataclasses
import importlib
import itertools
import json
import shutil
import sys
import warnings

import pytest
import torch

import opkit
from opkit import config
from opkit.errors import BuildCacheWarning, PackageError
from opkit.kernels import package as manifests
from opkit.kernels.triton import compiling, packaged, records
from opkit.kernels.triton.binaries import Binary, Param
from opkit.kernels.triton.record_format import Tried
from opkit.op import package as building
from opkit.op.triton import machine
from opkit.op.triton.building import ARCHITECTURES

_count = itertools.count()

OPERATORS = """
import opkit, torch, triton
import triton.language as tl
from torch import Tensor

SHIFT = tl.constexpr(0)

@triton.jit
def shifted(value):
    return value + SHIFT

@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, shifted(tl.load(x + at, at < n) + tl.load(y + at, at < n)), at < n)

@opkit.custom_op("NAME::plus", mutates_args=())
def plus(x: Tensor, y: Tensor) -> Tensor:
    return x + y

plus.register_kernel("cpu", opkit.triton_kernel(
    add, grid=lambda n, BLOCK: triton.cdiv(n, BLOCK), n=lambda x: x.numel, OPTIONS
))
"""
BY_PYTHON = """
kernel = opkit.triton_kernel(add, grid=lambda n, BLOCK: triton.cdiv(n, BLOCK), n=lambda x: x.numel, BLOCK=128)

@opkit.custom_op("NAME::thrice", mutates_args=())
def thrice(x: Tensor) -> Tensor:
    return 3 * x

@thrice.register_kernel(("cpu", "cuda"))
def two_launches(x: Tensor) -> Tensor:
    first, second = torch.empty_like(x), torch.empty_like(x)
    kernel(x=x, y=x, out=first)
    kernel(x=x, y=first, out=second)
    return second
"""
OPTIONS = 'BLOCK=128, examples=[{"x": "fp32[4096]", "y": "fp32[4096]"}]'
CONFIGS = 'configs=[{"BLOCK": 64}, {"BLOCK": 128, "num_warps": 2}], examples=[{"x": "fp32[4096]", "y": "fp32[4096]"}]'


def named(binary):
    """The binary under a name by which the fake driver computes what it is to compute, and checks its parameters."""
    return dataclasses.replace(binary, name=" ".join(["add", *(str(param.size) for param in binary.params)]))


class Package:
    """A Python package in a folder of its own; ``fresh`` imports it as a new process would."""

    def __init__(self, folder):
        self.name = f"triton_packaged{next(_count)}"
        self.place = folder / self.name
        self.place.mkdir(parents=True)
        self.write()

    def write(self, options=OPTIONS, edit=lambda text: text):
        text = OPERATORS.replace("NAME", self.name).replace("OPTIONS", options)
        (self.place / "__init__.py").write_text("from . import ops\n")
        (self.place / "ops.py").write_text(edit(text))

    def forget(self):
        for operator in opkit.operators():
            if operator.name.startswith(f"{self.name}::"):
                opkit.remove(operator.name)
        for module in [name for name in sys.modules if name.split(".")[0] == self.name]:
            del sys.modules[module]
        shutil.rmtree(self.place / "__pycache__", ignore_errors=True)
        importlib.invalidate_caches()

    def fresh(self):
        self.forget()
        return importlib.import_module(f"{self.name}.ops")

    def build(self, architectures=("sm_90",), **options):
        self.fresh()
        return building.build(self.name, architectures=architectures, **options)

    @property
    def built(self):
        return self.place / "_opkit"

    def change(self, edit):
        manifest = json.loads((self.built / "manifest.json").read_text())
        edit(manifest)
        (self.built / "manifest.json").write_text(json.dumps(manifest))

    def files(self):
        return {str(path.relative_to(self.built)) for path in self.built.rglob("*") if path.is_file()}


class Gpu:
    """What the fake driver stands for, and what was compiled and found in packages."""

    def __init__(self):
        self.target, self.shared = "sm_90", 232448
        self.compiled, self.found = [], []

    def machine(self, driver):
        return machine.Machine("cpu", lambda: driver, lambda i: self.target, lambda i: "Fake", lambda i: self.shared)


@pytest.fixture
def gpu(fake, monkeypatch):
    made = Gpu()
    build, opened = compiling.build, packaged._opened

    def built(request):
        made.compiled.append(request)
        return named(build(request))

    def found(folder, chosen):
        made.found.append(chosen)
        return opened(folder, chosen)

    monkeypatch.setitem(machine.MACHINES, "cpu", made.machine(fake.driver))
    monkeypatch.setattr(compiling, "build", built)
    monkeypatch.setattr(packaged, "_opened", found)
    return made


@pytest.fixture(scope="module", autouse=True)
def triton_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.fixture
def pack(tmp_path, gpu, monkeypatch):
    settings = config.Config(cache_dir=tmp_path / "cache", verify=False, bridge=False)
    monkeypatch.setattr(config, "get", lambda: settings)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    made = Package(tmp_path)
    yield made
    made.forget()


@pytest.fixture
def no_compiler(pack, monkeypatch):
    """Call after building: nothing may be compiled any more."""

    def forbid():
        def refuse(*args, **options):
            raise AssertionError("Triton compiles")

        monkeypatch.setattr("triton.compiler.compiler.compile", refuse)
        monkeypatch.setattr(compiling, "build", refuse)

    return forbid


def check(ops, x, y):
    torch.testing.assert_close(ops.plus(x, y), x + y)


def divisible(gpu):
    """What the binary that was found last was told that 16 divides."""
    return gpu.found[-1].form.divisible


# ---- which binary ----------------------------------------------------------------------------------------------------


def test_a_call_like_the_example_needs_no_compiler(pack, gpu, no_compiler):
    report = pack.build()
    assert len(report.binaries) == 3
    assert report.left_out == ()
    no_compiler()
    check(pack.fresh(), torch.randn(320), torch.randn(320))
    assert divisible(gpu) == ("n", "out", "x", "y")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.randn(4096), ("n", "out", "x", "y")),
        (lambda: torch.randn(333), ("out", "x", "y")),
        (lambda: torch.randn(1), ("out", "x", "y")),
        (lambda: torch.randn(321)[1:], ()),
        (lambda: torch.randn(2)[1:], ()),
    ],
    ids=["like the example", "an odd size", "one element", "a view", "a view of one element"],
)
def test_the_binary_that_was_told_the_most_is_taken(pack, gpu, no_compiler, make, expected):
    pack.build()
    no_compiler()
    check(pack.fresh(), make(), make())
    assert divisible(gpu) == expected


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


def test_tuning_results_come_along(pack, tmp_path, monkeypatch):
    pack.write(CONFIGS)
    identity, configs = identity_of(pack.fresh())
    tried = [Tried(each.to_json(), ms) for each, ms in zip(configs, (2.0, 1.0), strict=True)]
    records.remember(identity, "NVIDIA H200", "bucket", tried)
    records.remember(dataclasses.replace(identity, hash="old"), "NVIDIA A100", "bucket", tried)
    assert pack.build().tuned == 1
    settings = config.Config(cache_dir=tmp_path / "another", verify=False, bridge=False)
    monkeypatch.setattr(config, "get", lambda: settings)
    folders = records.packaged(f"{pack.name}.ops")
    assert records.lookup(identity, configs, "NVIDIA H200", "bucket", folders).config == configs[1]
    assert records.lookup(identity, configs, "NVIDIA A100", "bucket", folders).config is None


def test_results_that_lie_there_stay(pack, tmp_path, monkeypatch):
    test_tuning_results_come_along(pack, tmp_path, monkeypatch)
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
        assert isinstance(each.binary(image), Binary)
        assert each.binary(image).params[:4] == (*(Param("ptr", n) for n in ("x", "y", "out")), Param("i32", "n"))
