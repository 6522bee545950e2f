"""Kernels built ahead of time: found, checked and loaded, and compiled anew where they do not fit."""

import contextlib
import importlib
import itertools
import json
import shutil
import sys
import warnings

import pytest
import torch

import opkit
from opkit.errors import BuildCacheWarning, CompileError, NoCompilerWarning, ToolchainError
from opkit.kernels import aot_loading, aot_package
from opkit.kernels.cc import isa, toolchain
from opkit.op.aot import package as building

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")

_count = itertools.count()

OPERATORS = '''
import opkit, pathlib
from torch import Tensor

HERE = pathlib.Path(__file__).parent

@opkit.custom_op("NAME::shifted", mutates_args=())
def shifted(x: Tensor) -> Tensor:
    return x + 1

KERNEL = """
#include "shift.h"
void shifted(const T* x, T* out, int64_t x_numel) {
    for (int64_t i = 0; i < x_numel; i++) out[i] = x[i] + SHIFT + BY_ISA;
}
"""
shifted.register_kernel("cpu", opkit.c_kernel(KERNEL, dtypes=["float32"], flags=[f"-I{HERE}", f"-I{HERE}/include"]))
'''
HEADER = """
#define SHIFT 10
#if defined(__AVX512F__)
#define BY_ISA 300
#elif defined(__AVX2__)
#define BY_ISA 200
#else
#define BY_ISA 100
#endif
"""
BY_ISA = {"baseline": 100, "avx2": 200, "avx512": 300, "neon": 100}


class Package:
    """A Python package in a folder of its own; ``run`` calls its operator as a new process would."""

    def __init__(self, folder):
        self.folder = folder
        self.name = f"packaged{next(_count)}"
        self.place = folder / self.name
        self.place.mkdir(parents=True)
        self.write(OPERATORS)
        (self.place / "shift.h").write_text(HEADER)

    def write(self, text):
        (self.place / "__init__.py").write_text("from . import ops\n")
        (self.place / "ops.py").write_text(text.replace("NAME", self.name))

    def fresh(self):
        for operator in opkit.operators():
            if operator.name.startswith(f"{self.name}::"):
                opkit.remove(operator.name)
        for module in [name for name in sys.modules if name.split(".")[0] == self.name]:
            del sys.modules[module]
        shutil.rmtree(self.place / "__pycache__", ignore_errors=True)
        importlib.invalidate_caches()
        return importlib.import_module(f"{self.name}.ops")

    def build(self, **options):
        """Build ahead of time; only for what this processor has, where ``chosen`` does not say otherwise."""
        self.fresh()
        return building.build(self.name, with_programs=False, **{"chosen": [isa.host_isa()], **options})

    def run(self):
        return self.fresh().shifted(torch.zeros(3)).tolist()[0]

    def run_as_built(self):
        """The same, where the cache is empty and stays so, as nothing is compiled."""
        shutil.rmtree(self.folder / "cache", ignore_errors=True)
        result = self.run()
        assert not [*(self.folder / "cache").rglob("*.so")]
        return result

    @property
    def built(self):
        return self.place / "_opkit"

    def change(self, edit):
        manifest = json.loads((self.built / "manifest.json").read_text())
        edit(manifest)
        (self.built / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture
def packaged(tmp_path, settings, monkeypatch):
    settings(cache_dir=tmp_path / "cache", verify=0, bridge=0)
    monkeypatch.syspath_prepend(tmp_path)
    made = Package(tmp_path)
    yield made
    made.write("")
    made.fresh()
    for module in [name for name in sys.modules if name.split(".")[0] == made.name]:
        del sys.modules[module]


def widest():
    return 10 + BY_ISA[isa.host_isa()]


def test_what_was_built_is_loaded(packaged):
    packaged.build()
    assert packaged.run_as_built() == widest()


def test_without_a_package_the_kernel_is_compiled(packaged):
    assert packaged.run() in {10 + by for by in BY_ISA.values()}
    assert not packaged.built.exists()


def test_a_package_can_be_moved_and_leave_its_headers_behind(packaged, tmp_path, monkeypatch):
    packaged.build()
    packaged.place = packaged.place.rename(tmp_path / "elsewhere")
    (tmp_path / "site").mkdir()
    packaged.place = packaged.place.rename(tmp_path / "site" / packaged.name)
    (packaged.place / "shift.h").unlink()
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert packaged.run_as_built() == widest()


@pytest.mark.skipif(isa.machine() != "x86_64", reason="its instruction sets")
def test_the_widest_instruction_set_up_to_the_setting_is_taken(packaged, settings):
    packaged.build(chosen=[])
    order = isa.WIDENING["x86_64"]
    for cap in order:
        settings(isa=cap)
        narrower = order[min(order.index(cap), order.index(isa.host_isa()))]
        assert packaged.run_as_built() == 10 + BY_ISA[narrower], cap


@pytest.mark.skipif(isa.host_isa() not in ("avx2", "avx512"), reason="needs a processor with AVX2")
def test_an_instruction_set_that_was_not_built(packaged, settings):
    packaged.build(chosen=["avx2"])
    settings(isa="baseline")
    with pytest.warns(BuildCacheWarning, match="was built for avx2, and what can be used here is baseline"):
        assert packaged.run() == 110


def test_an_edited_source_is_compiled_and_said_once(packaged):
    packaged.build()
    packaged.write(OPERATORS.replace("+ SHIFT +", "+ 5 * SHIFT +"))
    with pytest.warns(BuildCacheWarning, match=r"was edited since it was built: its source.*opkit build packaged\d+`"):
        assert packaged.run() > 50 + 90
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert packaged.run() > 50 + 90


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace("(x: Tensor)", "(x: Tensor, unused: int = 0)"),
        lambda text: text.replace('flags=["', 'flags=["-DEXTRA=1", "').replace("flags=[f", 'flags=["-DEXTRA=1", f'),
        lambda text: text.replace('["float32"]', '["float32", "float64"]'),
        lambda text: text.replace("flags=", "bind={'x_numel': 'x_size_0'}, flags="),
    ],
    ids=["signature", "flags", "dtypes", "bind"],
)
def test_all_that_decides_what_is_compiled_counts(packaged, edit):
    packaged.build()
    packaged.write(edit(OPERATORS))
    with pytest.warns(BuildCacheWarning, match="edited"):
        assert packaged.run() >= 110


def test_what_does_not_decide_it_does_not_count(packaged):
    packaged.build()
    packaged.write("\n\n# moved down\n" + OPERATORS.replace("return x + 1", "return x + 1 + 0"))
    assert packaged.run_as_built() == widest()


def test_an_edited_header_is_noticed(packaged):
    packaged.build()
    (packaged.place / "shift.h").write_text(HEADER.replace("SHIFT 10", "SHIFT 70"))
    with pytest.warns(BuildCacheWarning, match=r"edited.*shift\.h differs"):
        assert packaged.run() >= 170


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        pytest.param(cut, "sha256 differs", id="truncated", marks=pytest.mark.exhaustive),
        pytest.param(flip, "sha256 differs", id="flipped"),
        pytest.param(lambda path: path.unlink(), "No such file", id="missing"),
    ],
)
def test_a_damaged_library_is_compiled_anew(packaged, damage, reason):
    packaged.build()
    for path in packaged.built.glob("*.so"):
        damage(path)
    with pytest.warns(BuildCacheWarning, match=f"{reason}.*opkit build"):
        assert packaged.run() >= 110


def test_a_library_that_is_none(packaged):
    packaged.build()
    (path,) = packaged.built.glob(f"*.{isa.host_isa()}.*.so")
    path.write_bytes(b"\x7fELF")

    def forge(manifest):
        for library in manifest["libraries"]:
            library.update(size=4, sha256=aot_loading.sha256_of(path), file=path.name)

    packaged.change(forge)
    with pytest.warns(BuildCacheWarning, match="cannot be loaded"):
        assert packaged.run() >= 110


def test_a_manifest_that_does_not_fit(packaged):
    packaged.build()
    built = (packaged.built / "manifest.json").read_text()
    for edit, reason in (
        (lambda m: m.update(abi=99), "version 99 of opkit's kernel interface, and this opkit has version"),
        (lambda m: m.update(machine="pdp11"), "was built for pdp11"),
        (lambda m: m.update(format=99), "its format is 99"),
        (lambda m: m.pop("libraries"), "cannot be read: KeyError"),
        (lambda m: m["libraries"][0].update(file="../evil.so"), "'../evil.so' is not the name of a library"),
        (lambda m: m["libraries"][0].pop("sha256"), "cannot be read: TypeError"),
    ):
        (packaged.built / "manifest.json").write_text(built)
        packaged.change(edit)
        with pytest.warns(BuildCacheWarning, match=reason):
            assert packaged.run() >= 110


def test_a_manifest_that_is_none(packaged):
    packaged.build()
    for content in (b"", b"{", b"[]", b"\xff", b"[" * 100_000):
        (packaged.built / "manifest.json").write_bytes(content)
        with pytest.warns(BuildCacheWarning, match=r"manifest\.json cannot be read"):
            assert packaged.run() >= 110, content[:9]


def test_a_kernel_that_the_manifest_does_not_name_is_compiled(packaged):
    packaged.build()
    packaged.change(lambda m: m["libraries"].clear())
    assert packaged.run() >= 110


def test_a_damaged_library_and_a_broken_source(packaged):
    packaged.build()
    packaged.write(OPERATORS.replace("for (", "four ("))
    with pytest.warns(BuildCacheWarning, match="edited"), pytest.raises(CompileError, match="four"):
        packaged.run()


def test_a_damaged_library_where_there_is_no_compiler(packaged, settings):
    packaged.build()
    for path in packaged.built.glob("*.so"):
        flip(path)

    settings(cc="/nonexistent/cc")
    with pytest.warns(BuildCacheWarning, match="sha256"), pytest.warns(NoCompilerWarning, match="OPKIT_CC"):
        assert packaged.run() == 1  # the reference


CUDA = '''
import opkit
from torch import Tensor

@opkit.custom_op("NAME::shifted", mutates_args=())
def shifted(x: Tensor) -> Tensor:
    return x + 1

shifted.register_kernel("cuda", opkit.cuda_kernel("""
    __global__ void shift(const T* x, T* out, int64_t n) { if (threadIdx.x < n) out[threadIdx.x] = x[threadIdx.x] + 10; }
    extern "C" void shifted(const T* x, T* out, int64_t x_numel, cudaStream_t stream) {
        shift<<<1, 256, 0, stream>>>(x, out, x_numel);
    }
""", dtypes=["float32"]))
'''


@pytest.fixture
def packaged_cuda(packaged):
    try:
        toolchain.find("cuda")
    except ToolchainError as error:
        pytest.skip(str(error).splitlines()[0])
    packaged.write(CUDA)
    return packaged


@pytest.mark.parametrize(
    ("capabilities", "reason"),
    [
        ([(9, 0)], ""),
        ([(8, 6)], ""),
        ([(12, 0)], ""),  # by PTX
        ([(7, 5), (9, 0)], ""),
        ([(7, 5)], "was built for sm_80, sm_90, compute_90, and this GPU is sm_75"),
    ],
)
def test_gpus_that_a_package_was_built_for(packaged_cuda, monkeypatch, capabilities, reason):
    packaged_cuda.build(architectures=["sm_80", "sm_90"])
    packaged_cuda.fresh()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capabilities[device or 0])
    (function,) = building.native_functions(packaged_cuda.name)
    shutil.rmtree(packaged_cuda.folder / "cache")
    with pytest.warns(BuildCacheWarning, match=reason) if reason else contextlib.nullcontext():
        function.open()
    assert (
        [*(packaged_cuda.folder / "cache").rglob("*.so")] != []
        if reason
        else not (packaged_cuda.folder / "cache").exists()
    )


@pytest.mark.gpu
def test_a_kernel_on_a_gpu_runs_as_it_was_built(packaged_cuda, settings):
    x = torch.zeros(3, device="cuda")
    here = "sm_{}{}".format(*torch.cuda.get_device_capability())
    packaged_cuda.build(architectures=["sm_80", here])
    shutil.rmtree(packaged_cuda.folder / "cache")
    settings(cache_dir=packaged_cuda.folder / "cache", verify=0, bridge=0, cxx="/nonexistent/c++")
    assert packaged_cuda.fresh().shifted(x).tolist() == [10] * 3
    settings(cache_dir=packaged_cuda.folder / "cache", verify=0, bridge=0, cxx=shutil.which("g++"))
    packaged_cuda.build(architectures=["sm_75" if here != "sm_75" else "sm_120"])
    packaged_cuda.change(lambda m: m["libraries"][0]["architectures"].pop())  # PTX, which would serve
    with pytest.warns(BuildCacheWarning, match=f"was built for .*, and this GPU is {here}"):
        assert packaged_cuda.fresh().shifted(x).tolist() == [10] * 3


def test_names_with_odd_characters_make_file_names(packaged):
    packaged.write(OPERATORS.replace('/include"]))', '/include"]), name="../a b;\\n")'))
    report = packaged.build()
    assert {library.kernel for library in report.libraries} == {"../a b;\n"}
    assert all("/" not in library.file and " " not in library.file for library in report.libraries)
    assert packaged.run_as_built() == widest()


def test_places(tmp_path, monkeypatch):
    for name in ("top/inner/__init__.py", "top/__init__.py", "top/inner/leaf.py", "alone.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("top", "top.inner", "top.inner.leaf", "alone"):
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    top, inner = tmp_path / "top" / "_opkit", tmp_path / "top" / "inner" / "_opkit"
    assert aot_loading.places("top.inner.leaf", "_opkit") == [inner, top]
    assert aot_loading.places("top.inner", "_opkit") == [inner, top]
    assert aot_loading.places("top", "_opkit") == [top]
    assert aot_loading.places("alone", "_opkit") == [tmp_path / "_opkit_alone"]
    assert aot_loading.places("no.such.module", "_opkit") == []
    assert aot_loading.root("top.inner.leaf") == tmp_path / "top"
    assert aot_loading.root("alone") == tmp_path


def test_the_runtime_for_programs_without_python_is_there():
    assert aot_package.runtime_library().read_bytes().startswith((b"\x7fELF", b"\xcf\xfa\xed\xfe"))
