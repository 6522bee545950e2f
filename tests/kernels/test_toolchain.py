"""Which compiler is found, what is known of it without starting it, and which instruction set is built for."""

import os
import shutil
import stat

import pytest

from opkit import errors
from opkit.kernels.cc import isa, toolchain


@pytest.fixture
def settings(settings, monkeypatch):
    """``settings(cc="clang")``, and no compiler's name in the environment."""
    for name in ("CC", "CXX", "NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    return settings


@pytest.fixture
def folder(tmp_path, monkeypatch, settings):
    """A folder that is all of PATH; CUDA's compiler is nvcc."""
    settings(cuda_compiler="nvcc")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolchain, "_CUDA_DEFAULT", str(tmp_path / "none"))
    return tmp_path


def program(path, says="", more=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{more}\necho '{says}'\n")
    path.chmod(0o755)
    return str(path)


GCC_SAYS = "cc 12.2.0\nCopyright (C) 2022 Free Software Foundation, Inc."
CLANG_SAYS = "Debian clang version 14.0.6"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_gcc_is_found_first(settings):
    found = toolchain.find("c")
    assert (found.family, found.language, found.path) == ("gcc", "c", shutil.which("gcc"))
    assert os.path.realpath(found.path) in found.identity
    assert "12" in toolchain.version(found) or "gcc" in toolchain.version(found)


def test_names_are_tried_in_order(folder):
    orders = {"c": ["gcc", "clang", "cc"], "c++": ["g++", "clang++", "c++"], "cuda": ["nvcc"]}
    for language, order in orders.items():
        for name in reversed(order):
            program(folder / name, GCC_SAYS)
            toolchain._search.cache_clear()  # one that is found is kept for the life of the process
            assert toolchain.find(language).path == str(folder / name)


def test_a_name_tells_the_family_or_the_program_is_asked(folder, settings):
    for name, says, family in (
        ("x86_64-linux-gnu-gcc-12", CLANG_SAYS, "gcc"),
        ("g++-13", CLANG_SAYS, "gcc"),
        ("clang", GCC_SAYS, "clang"),
        ("clang++-19", GCC_SAYS, "clang"),
        ("aarch64-linux-gnu-clang", GCC_SAYS, "clang"),
        ("cc", CLANG_SAYS, "clang"),
        ("gcc-wrapper", CLANG_SAYS, "clang"),
        ("notgcc", CLANG_SAYS, "clang"),
    ):
        settings(cc=program(folder / name, says))
        assert toolchain.find("c").family == family, name


def test_on_macos_gcc_may_be_clang(folder, settings, monkeypatch):
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    for name, family in (("gcc", "clang"), ("gcc-13", "gcc")):
        settings(cc=program(folder / name, CLANG_SAYS))
        assert toolchain.find("c").family == family, name


def test_a_name_that_tells_starts_no_program(folder):
    program(folder / "gcc", more=f"touch {folder}/started")
    assert toolchain.find("c").family == "gcc"
    assert not (folder / "started").exists()


@pytest.mark.parametrize(("says", "family"), [(GCC_SAYS, "gcc"), (CLANG_SAYS, "clang")])
def test_a_name_that_does_not_tell_is_asked_once(folder, says, family):
    program(folder / "cc", says, more=f"echo >> {folder}/started")
    assert [toolchain.find("c").family for _ in range(3)] == [family] * 3
    assert (folder / "started").read_text().count("\n") == 1


def test_an_unknown_compiler_is_passed_over(folder):
    program(folder / "cc", "tcc version 0.9.27")
    with pytest.raises(errors.ToolchainError, match="No C compiler"):
        toolchain.find("c")


def test_the_setting_comes_before_the_variable_and_that_before_the_names(folder, settings, monkeypatch):
    for name in ("gcc", "mine/gcc", "theirs/clang"):
        program(folder / name)
    monkeypatch.setenv("CC", str(folder / "theirs" / "clang"))
    assert toolchain.find("c").family == "clang"
    settings(cc=str(folder / "mine" / "gcc"))
    assert toolchain.find("c").path == str(folder / "mine" / "gcc")
    settings(cc="")
    monkeypatch.setenv("CC", str(folder / "gone"))
    assert toolchain.find("c").path == str(folder / "gcc")


def test_a_variable_may_hold_arguments(folder, monkeypatch):
    program(folder / "ccache", GCC_SAYS)
    program(folder / "gcc")
    monkeypatch.setenv("CC", "ccache gcc '-DX=a b'")
    found = toolchain.find("c")
    assert found.command == (str(folder / "ccache"), "gcc", "-DX=a b")
    assert found.family == "gcc"
    assert str(folder / "gcc") in found.identity


def test_a_path_with_blanks_and_shell_characters_is_one_program(folder, settings):
    path = program(folder / "a b;$(touch pwned)" / "gcc")
    settings(cc=path)
    assert toolchain.find("c").command == (path,)


def test_a_setting_that_names_nothing_is_an_error(folder, settings):
    settings(cc="no-such-compiler")
    with pytest.raises(errors.ToolchainError, match=r"OPKIT_CC='no-such-compiler' names no program"):
        toolchain.find("c")


def test_a_setting_that_names_something_else_is_an_error(folder, settings):
    settings(cxx=program(folder / "tool", "a tool"))
    with pytest.raises(errors.ToolchainError, match=r"OPKIT_CXX=.* is not gcc or clang"):
        toolchain.find("c++")
    settings(cc=program(folder / "nvcc"))
    with pytest.raises(errors.ToolchainError, match="is not gcc or clang"):
        toolchain.find("c")


def test_no_compiler_is_one_clear_message(folder):
    for language, command in (("c", "apt-get install gcc"), ("c++", "gcc-c"), ("cuda", "nvcc")):
        with pytest.raises(errors.ToolchainError) as raised:
            toolchain.find(language)
        for text in ("is on PATH", command, "Debian", "Fedora", "conda"):
            assert text in str(raised.value), language


def test_a_compiler_installed_meanwhile_is_found(folder):
    with pytest.raises(errors.ToolchainError):
        toolchain.find("c")
    program(folder / "gcc")
    assert toolchain.find("c").family == "gcc"
    (folder / "gcc").unlink()
    program(folder / "clang")
    assert toolchain.find("c").family == "clang"


def test_identity_changes_with_the_compiler(folder):
    path = program(folder / "gcc")
    before = toolchain.find("c").identity
    assert toolchain.find("c").identity == before
    os.utime(path, ns=(1, 1))
    assert toolchain.find("c").identity != before


def test_identity_follows_links(folder):
    program(folder / "deep" / "gcc-12")
    (folder / "gcc").symlink_to(folder / "deep" / "gcc-12")
    before = toolchain.find("c").identity
    assert str(folder / "deep" / "gcc-12") in before
    os.utime(folder / "deep" / "gcc-12", ns=(1, 1))
    assert toolchain.find("c").identity != before


def test_a_file_that_cannot_be_run_is_no_compiler(folder):
    path = folder / "gcc"
    path.write_text("")
    path.chmod(stat.S_IRUSR)
    with pytest.raises(errors.ToolchainError):
        toolchain.find("c")


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_nvcc_is_found_in_its_toolkit(folder, monkeypatch, variable):
    path = program(folder / "cuda" / "bin" / "nvcc")
    monkeypatch.setenv(variable, str(folder / "cuda"))
    assert toolchain.find("cuda").path == path


def test_nvcc_is_found_in_the_usual_place(folder, monkeypatch):
    path = program(folder / "cuda" / "bin" / "nvcc")
    monkeypatch.setattr(toolchain, "_CUDA_DEFAULT", str(folder / "cuda"))
    assert toolchain.find("cuda").path == path


def test_an_unknown_language(folder):
    with pytest.raises(errors.ToolchainError, match="'fortran'"):
        toolchain.find("fortran")


def test_the_command_that_installs_one_fits_the_system(monkeypatch):
    for system, command in (("Linux", "apt-get install gcc"), ("Darwin", "xcode")):
        monkeypatch.setattr("platform.system", lambda system=system: system)
        assert command in toolchain.install_command("c"), system
    monkeypatch.setattr("platform.system", lambda: "Plan9")
    assert toolchain.install_command("c") is None


# ---- instruction sets ------------------------------------------------------------------------------------------------

AVX2 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"}
AVX512 = AVX2 | {"avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl"}


@pytest.fixture
def processor(monkeypatch, settings):
    """Another processor: ``processor("x86_64", {"avx2", ...})``."""

    def choose(machine, linux=(), core=None):
        monkeypatch.setattr(isa, "machine", lambda: machine)
        monkeypatch.setattr(isa, "_from_linux", lambda: frozenset(linux))
        monkeypatch.setattr(isa, "_from_core", lambda: core or {})
        isa._usable.cache_clear()
        isa.cpu_features.cache_clear()

    yield choose
    isa._usable.cache_clear()
    isa.cpu_features.cache_clear()


def test_the_widest_usable_instruction_set(processor):
    for machine, flags, expected in (
        ("x86_64", set(), "baseline"),
        ("x86_64", {"sse2"}, "baseline"),
        ("x86_64", AVX2, "avx2"),
        ("x86_64", AVX2 - {"fma"}, "baseline"),
        ("x86_64", AVX512, "avx512"),
        ("x86_64", AVX512 - {"avx512vl"}, "avx2"),
        ("aarch64", {"asimd"}, "neon"),
        ("riscv64", set(), "baseline"),
    ):
        processor(machine, flags)
        assert isa.host_isa() == expected, (machine, flags)


def test_without_linux_the_compiled_core_tells(processor):
    core = dict.fromkeys(["avx2", "fma", "f16c", "avx512f", "avx512dq", "avx512bw", "avx512vl"], True)
    processor("x86_64", core=core)
    assert isa.host_isa() == "avx512"
    processor("x86_64", core={**core, "avx512bw": False})
    assert isa.host_isa() == "avx2"


def test_a_setting_caps_what_is_used(processor, settings):
    processor("x86_64", AVX2)
    for cap, expected in (("amx", "avx2"), ("avx512", "avx2"), ("avx2", "avx2"), ("baseline", "baseline")):
        settings(isa=cap)
        assert isa.host_isa() == expected, cap
        assert isa.isa_flags("native", "gcc") == isa.isa_flags(expected, "gcc"), cap
        assert isa.effective("native") == expected, cap


def test_a_cap_of_another_processor_is_an_error(processor, settings):
    processor("x86_64", AVX2)
    settings(isa="neon")
    with pytest.raises(errors.ConfigError, match="OPKIT_ISA='neon' is not for x86_64"):
        isa.host_isa()


def test_flags_of_each_instruction_set(processor):
    processor("x86_64", AVX512)
    assert isa.isa_flags("native", "gcc") == ("-march=native",)
    assert isa.isa_flags("avx2", "clang") == ("-march=x86-64-v3",)
    assert isa.isa_flags("avx512", "gcc") == ("-march=x86-64-v4",)
    assert isa.isa_flags("native", "nvcc") == ()
    with pytest.raises(errors.ArgumentError, match="isa='neon'"):
        isa.isa_flags("neon", "gcc")
    processor("aarch64")
    assert isa.isa_flags("neon", "gcc") == ("-march=armv8-a",)


def test_features_are_those_of_linux_and_of_the_core(processor):
    processor("x86_64", {"avx2", "sse4a"}, {"amx_tile": True, "avx512f": False})
    assert isa.cpu_features() == ("amx_tile", "avx2", "sse4a")


def test_features_are_read_from_linux(tmp_path):
    listing = tmp_path / "cpuinfo"
    listing.write_text("processor\t: 0\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t\t: other\n")
    assert isa._from_linux(str(listing)) == {"fpu", "avx2"}
    assert isa._from_linux(str(tmp_path / "none")) == frozenset()


def test_the_last_cache_is_read_from_linux(tmp_path):
    for name, size in (("index0", "32K"), ("index2", "1M"), ("index3", "32768K"), ("index4", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "size").write_text(size + "\n")
    assert isa.last_cache(str(tmp_path)) == 32 << 20
    assert isa.last_cache(str(tmp_path / "nowhere")) is None
