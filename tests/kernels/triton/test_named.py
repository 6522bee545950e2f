"""Triton functions and constants by name, and what is found in the cache without Triton."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from triton import knobs
from triton._C import libtriton
from triton.experimental.gluon import language as gl

import opkit
from opkit.errors import DeclarationError, KernelError
from opkit.kernels.triton import compiling, environment, named, parsing, specialisation, stored
from opkit.kernels.triton.compiling import CompileRequest
from opkit.kernels.triton.named import Named

CONSTANTS = "from math import tau\nSHIFT = 1 + 0 * int(tau)\n"
DEVICE = """
import triton
import triton.language as tl

from PACKAGE import constants as other
from PACKAGE.constants import (
    SHIFT,  # added (to all)
)

_SHIFT = tl.constexpr(SHIFT)
_SIZES = ("n", *(f"m{i}" for i in range(2)))


@triton.jit(do_not_specialize=(*_SIZES, "k"))
def shifted(
    x, out, n, m0, m1=3, k=None, BLOCK: tl.constexpr = 64,
):  # fmt: skip
    \"\"\"Adds.

\"\"\"
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + _SHIFT, mask=at < n)
"""
SIGNATURE = {"x": "*fp32", "out": "*fp32", "n": "i32", "m0": "i32", "m1": "i32", "k": "constexpr", "BLOCK": "constexpr"}
CHILD = f"""
import hashlib, json, sys, types
sys.modules["opkit"] = types.ModuleType("opkit")  # opkit/__init__.py would import torch
sys.modules["opkit"].__path__ = {[str(Path(opkit.__file__).parent)]!r}
from opkit.kernels.triton import compiling
from opkit.kernels.triton.named import Named
signature, constants, module = json.loads(sys.argv[1])
built = compiling.build(compiling.CompileRequest(Named(module, "shifted"), signature, constants))
print(json.dumps([hashlib.sha256(built.image).hexdigest(), "triton" in sys.modules, "torch" in sys.modules]))
"""


@pytest.fixture
def forget():
    """As in a new process."""

    def forgotten():
        for cached in (parsing.file_of, parsing.read_header, parsing._file_of, environment.installed_triton):
            cached.cache_clear()
        environment._files.clear()

    forgotten()
    yield forgotten
    forgotten()


@pytest.fixture
def package(tmp_path, monkeypatch, forget):
    """A package with a kernel, which was not imported; ``package("constants", old, new)`` edits a file of it."""
    name = f"named_{tmp_path.name}".replace("-", "_")
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "constants.py").write_text(CONSTANTS)
    (folder / "device.py").write_text(DEVICE.replace("PACKAGE", name))
    (folder / "unused.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Package(folder, forget)
    for module in [each for each in sys.modules if each.partition(".")[0] == name]:
        del sys.modules[module]
        environment._imported_here.pop(module, None)


class Package:
    def __init__(self, folder, forget):
        self.folder, self.forget = folder, forget
        self.module = f"{folder.name}.device"
        self.function = Named(self.module, "shifted")

    def __call__(self, name, old, new):
        path = self.folder / f"{name}.py"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
        self.forget()

    def request(self, **changed):
        given = {"function": self.function, "signature": SIGNATURE, "constexprs": {"k": None, "BLOCK": 64}, **changed}
        return CompileRequest(**given)

    def key(self, **changed):
        found = compiling._named_key(self.request(**changed))
        assert found is not None
        return found


# ---- what a file says ------------------------------------------------------------------------------------------------


def test_parameters_are_read_as_triton_has_them(package):
    header = package.function.header
    read = specialisation.parameters(package.function)
    assert self_imports(package) == []
    function = package.function.loaded()
    assert read == specialisation.parameters(function)
    assert [each.default for each in header.parameters] == [each.default for each in function.params]
    assert (header.file, header.line) == (function.fn.__code__.co_filename, function.fn.__code__.co_firstlineno)
    assert header.gluon is False


def self_imports(package):
    return [name for name in sys.modules if name.partition(".")[0] == package.folder.name]


def test_what_a_file_does_not_tell_for_certain_is_not_read(package):
    for old, new in (
        ("@triton.jit(", "@triton.autotune([], [])\n@triton.jit("),
        ("@triton.jit(", "@other.jit("),
        ("    x, out,", "    x: tl.int32, out,"),
        ("m1=3", "m1=SHIFT + tau"),
        ("m1=3", "m1=print()"),
        ("BLOCK: tl.constexpr = 64,\n", "BLOCK: tl.constexpr = 64, **more\n"),
        ('"k"))', '"k"), repr=str)'),
        ("def shifted(", "def shifted(x):\n    pass\n\n\ndef shifted("),
        ("def shifted(", "def another("),
        ("def shifted(", "shifted = 1\n\n\n@triton.jit\ndef shifted("),
        ("_SIZES = ", "_SIZES = ()\n_SIZES = "),
    ):
        assert package.function.header is not None
        written = (package.folder / "device.py").read_text()
        package("device", old, new)
        assert package.function.header is None, new
        (package.folder / "device.py").write_text(written)
        package.forget()


def test_a_function_that_is_not_there(package):
    assert Named(package.module, "missing").header is None
    with pytest.raises(DeclarationError, match=r"The Triton kernel missing of .*device cannot be loaded: .*missing"):
        opkit.triton_kernel(Named(package.module, "missing"), grid=1)
    with pytest.raises(DeclarationError, match=r"nowhere\.at_all"):
        opkit.triton_kernel(Named("nowhere.at_all", "f"), grid=1)


def test_a_kernel_of_a_named_function_is_declared_without_importing_it(package):
    kernel = opkit.triton_kernel(package.function, grid=1, BLOCK=128)
    assert kernel.name == "shifted"
    assert f"{package.folder}/device.py:" in repr(kernel)
    with pytest.raises(DeclarationError, match="'BLOCKS' is neither a parameter"):
        opkit.triton_kernel(package.function, grid=1, BLOCKS=128)
    assert self_imports(package) == []


# ---- what decides the result -----------------------------------------------------------------------------------------


def test_equal_requests_have_equal_keys_and_what_is_not_imported_does_not_count(package):
    before = package.key()
    package("unused", "", "changed = 1\n")
    assert package.key() == before


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("device", "+ _SHIFT", "- _SHIFT"), ("constants", "SHIFT = 1", "SHIFT = 2"), ("device", "Adds.", "Subtracts.")],
)
def test_a_changed_file_is_another_key(package, name, old, new):
    before = package.key()
    package(name, old, new)
    assert package.key() != before


def test_another_request_is_another_key(package):
    before = package.key()
    for changed in (
        {"constexprs": {"k": None, "BLOCK": 128}},
        {"constexprs": {"k": None, "BLOCK": 64.0}},
        {"signature": {**SIGNATURE, "n": "i64"}},
        {"divisible": frozenset({"n"})},
        {"options": {"num_warps": 8}},
        {"target": "sm_100"},
        {"wide": True},
        {"offsets": True},
    ):
        assert package.key(**changed) != before, changed


def test_one_architecture_in_two_spellings_is_one_key(package):
    assert package.key(target="sm_90a") == package.key(target="sm90")


def test_a_changed_variable_is_another_key(package, monkeypatch):
    before = package.key()
    for variable in (
        "TRITON_DEFAULT_FP_FUSION", "DISABLE_PTXAS_OPT", "PTXAS_OPTIONS", "LLVM_PASS_PLUGIN_PATH", "USE_IR_LOC",
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setenv(variable, "1")
            assert package.key() != before, variable


def test_another_file_of_a_variable_is_another_key(package, monkeypatch, tmp_path):
    assembler = tmp_path / "ptxas"
    assembler.write_text("one")
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(assembler))
    before = package.key()
    assembler.write_text("another")
    assert package.key() != before


@pytest.mark.exhaustive  # it reads half a gigabyte of Triton's library
def test_every_variable_that_triton_heeds_counts():
    words = re.findall(rb"\0([A-Z][A-Z0-9]+_[A-Z0-9_]+)(?=\0)", Path(libtriton.__file__).read_bytes())
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    others = {word.decode(): "1" for word in words if not word.startswith((b"LD_", b"PYTHON", b"MALLOC_", b"TRITON_"))}
    program = "import json; from triton._C.libtriton import get_cache_invalidating_env_vars as f; print(json.dumps(list(f())))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**others, **kept}, stdout=subprocess.PIPE, check=True)
    heeded = json.loads(done.stdout)
    assert {"DISABLE_LLVM_OPT", "MLIR_ENABLE_TIMING", "USE_IR_LOC"} < set(
        heeded
    )  # those that begin with TRITON_ always count
    assert [name for name in heeded if not environment._READ.fullmatch(name)] == []


def test_every_variable_of_triton_s_settings_counts():
    settings = Path(knobs.__file__).read_text(encoding="utf-8")
    named = set(re.findall(r'env_\w+\(\s*"([A-Z0-9_]+)"', settings)) - {"CC"}  # the compiler of Triton's launchers
    assert len(named) > 20
    assert [name for name in named if not environment._READ.fullmatch(name)] == []


@pytest.mark.parametrize("change", ["version", "library"])
def test_another_triton_is_another_key(package, monkeypatch, tmp_path, change):
    copy = tmp_path / "triton"
    (copy / "_C").mkdir(parents=True)
    (copy / "__init__.py").write_text("__version__ = '3.6.0'\n")
    (copy / "_C" / "libtriton.so").write_text("one")
    monkeypatch.setattr(environment, "_folder", lambda: copy)
    package.forget()
    before = package.key()
    changed = copy / ("__init__.py" if change == "version" else "_C/libtriton.so")
    changed.write_text(changed.read_text().replace("3.6.0", "3.6.1").replace("one", "another"))
    package.forget()
    assert package.key() != before


def test_triton_is_found_without_importing_it():
    status = os.stat(libtriton.__file__)
    assert environment.installed_triton() == (triton.__version__, (status.st_size, status.st_mtime_ns))


def test_what_triton_is_told_while_it_is_imported_counts(package, monkeypatch):
    before = package.key()
    monkeypatch.setattr(knobs.runtime, "debug", True)
    assert package.key() != before
    monkeypatch.setattr(knobs.compilation, "always_compile", True)
    assert compiling._named_key(package.request()) is None


@pytest.mark.parametrize("variable", ["TRITON_ALWAYS_COMPILE", "TRITON_KERNEL_DUMP", "TRITON_KERNEL_OVERRIDE"])
def test_nothing_is_found_where_triton_is_to_compile(package, monkeypatch, variable):
    monkeypatch.setattr(environment, "_knobs", lambda: None)
    package.key()
    monkeypatch.setenv(variable, "1")
    assert compiling._named_key(package.request()) is None


def test_a_module_that_others_imported_is_asked_itself(package):
    __import__(package.module)
    assert package.function.origin is None
    assert compiling._named_key(package.request()) is None


def test_an_unknown_library_may_be_anything(package):
    package("constants", "from math import tau", "from hypothesis.internal.floats import SMALLEST_SUBNORMAL as tau")
    assert package.function.origin is None


def test_a_module_written_after_it_was_imported(package, monkeypatch):
    __import__(f"{package.folder.name}.constants")
    assert package.function.origin is None  # it was written while this process ran
    monkeypatch.setattr(environment, "_STARTED", (package.folder / "constants.py").stat().st_mtime_ns)
    assert package.function.origin is not None


# ---- what is kept and found ------------------------------------------------------------------------------------------


def noted():
    return sorted((stored.root() / "named").glob("*/*"))


def test_it_is_compiled_as_the_function_itself_and_noted(compiled, package):
    built = compiling.build(package.request())
    (note,) = noted()
    assert note.stat().st_mode & 0o777 == 0o600
    assert compiling.build(package.request()) == built
    assert compiling.build(package.request(function=package.function.loaded())) == built
    assert len(compiled) == 1


def test_a_comment_costs_no_compilation(compiled, package):
    compiling.build(package.request())
    package("constants", "SHIFT", "SHIFT")
    (package.folder / "constants.py").write_text(CONSTANTS + "# nothing\n")
    package.forget()
    environment._imported_here.clear()
    for name in self_imports(package):
        del sys.modules[name]
    compiling.build(package.request())
    assert len(compiled) == 1
    assert len(noted()) == 2


def test_a_note_that_is_not_as_it_was_written_is_not_trusted(compiled, package):
    for name, damage in {
        "no key": lambda path: path.write_text("no key"),
        "of nothing": lambda path: path.write_text("0" * 64),
        "a file of all": lambda path: path.chmod(0o666),
        "a folder of all": lambda path: path.parent.chmod(0o777),
        "notes of all": lambda path: path.parents[1].chmod(0o777),
    }.items():
        compiling.build(package.request())
        assert stored.find_named(package.key()) is not None, name
        damage(noted()[0])
        assert stored.find_named(package.key()) is None, name
        shutil.rmtree(stored.root() / "named")


def test_a_module_that_was_changed_in_the_process_is_not_noted(compiled, package):
    package.function.loaded()
    sys.modules[package.module]._SHIFT = triton.language.constexpr(5)
    compiling.build(package.request())
    assert noted() == []


def test_notes_are_removed_with_what_they_are_of(compiled, package):
    compiling.build(package.request())
    assert stored.clear() == 1
    assert noted() == []


def test_a_second_process_finds_it_without_triton(package, tmp_path):
    given = json.dumps([SIGNATURE, {"k": None, "BLOCK": 64}, package.module])
    paths = [str(tmp_path), str(Path(opkit.__file__).parents[1]), *sys.path]
    caches = {"OPKIT_CACHE_DIR": str(tmp_path / "opkit"), "TRITON_CACHE_DIR": str(tmp_path / "triton_cache")}
    environ = {**os.environ, **caches, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    triton_on_3_13 = "ignore:AnnAssign.__init__ missing 1 required positional argument"
    command = [sys.executable, "-W", "error", "-W", triton_on_3_13, "-c", CHILD, given]

    def built():
        return json.loads(subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True).stdout)

    first, second = built(), built()
    assert first[1] is True
    assert second == [first[0], False, False]
    package("constants", "SHIFT = 1", "SHIFT = 2")
    other = built()
    assert other[0] != first[0]
    assert other[1] is True


def test_a_layout_is_written_out_as_gluon_writes_it():
    fields = {"swizzle_byte_width": 128, "element_bitwidth": 16, "rank": 4}
    layout, own = named.Layout("NVMMASharedLayout", **fields), gl.NVMMASharedLayout(**fields)
    assert named.resolved(layout) == own
    for given in (layout, own):
        assert named.written_out(f"tensordesc<bf16[1, 64],{given!r}>") == f"tensordesc<bf16[1, 64],{own!r}>"
    assert layout == named.Layout("NVMMASharedLayout", **fields)
    assert layout != named.Layout("NVMMASharedLayout", **{**fields, "rank": 2})
    assert named.written_out("tensordesc<bf16[1, 64]>") == "tensordesc<bf16[1, 64]>"


def test_a_layout_that_gluon_does_not_have():
    with pytest.raises(KernelError, match=r"Gluon has no layout SharedMemory\(rank=4\)"):
        named.Layout("SharedMemory", rank=4).resolved()
    with pytest.raises(KernelError, match="AssertionError"):
        named.Layout("NVMMASharedLayout", swizzle_byte_width=7, element_bitwidth=16).resolved()


def test_element_types():
    assert named.resolved(named.Element("bfloat16")) is triton.language.bfloat16
    assert named.Element("bfloat16") != named.Element("float16")
    assert compiling.value_text(named.Element("bfloat16")) != compiling.value_text(named.Element("float16"))
