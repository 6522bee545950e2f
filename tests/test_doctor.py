"""What ``opkit doctor`` finds, on this machine and on ones with something missing."""

import importlib.metadata
import os
import platform
import stat
import sys
import sysconfig

import pytest

from opkit import doctor
from opkit.kernels.cc import nvrtc, toolchain


def by_name(findings):
    return {finding.name: finding for finding in findings}


def test_every_section_is_reported_once_and_nothing_fails():
    findings = doctor.examine()
    sections = [finding.section for finding in findings]
    assert list(dict.fromkeys(sections)) == ["platform", "packages", "compilers", "cpu", "gpus", "caches"]
    assert "error" not in by_name(findings)


def test_whatever_is_missing_comes_with_a_command():
    assert all(finding.fix for finding in doctor.examine() if finding.status == "missing")


def test_a_missing_package_is_named_with_its_specifier(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = by_name(doctor._packages())["cffi"]
    assert (found.status, found.value) == ("missing", "not installed")
    assert found.fix == f"{sys.executable} -m pip install 'cffi>=1.17'"
    plot = by_name(doctor._packages())["matplotlib"]
    assert (plot.status, plot.fix) == ("note", f"{sys.executable} -m pip install 'opkit[plot]'")


@pytest.mark.parametrize(
    ("version", "status"), [("2.10.0", "missing"), ("2.11.0", "ok"), ("2.13.0+cpu", "ok"), ("2.99.0", "note")]
)
def test_torch_is_judged_by_its_version(monkeypatch, version, status):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert by_name(doctor._packages())["torch"].status == status


@pytest.fixture
def bare(monkeypatch):
    """A machine without compilers, and a torch without CUDA."""
    monkeypatch.setattr(nvrtc, "_cuda_of", lambda torch: None)
    monkeypatch.setattr(toolchain, "_CUDA_DEFAULT", "/nonexistent")
    monkeypatch.setenv("PATH", "")
    for name in ("CC", "CXX", "NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)


def test_the_compiler_of_cuda_is_the_one_that_is_used(monkeypatch, tmp_path, settings):
    library = tmp_path / "libnvrtc.so.13"
    library.touch()
    monkeypatch.setattr(nvrtc, "library", lambda: library)
    monkeypatch.setattr(toolchain, "version", lambda compiler: {"nvrtc": "NVRTC 13.0"}.get(compiler.family, "nvcc's"))
    toolchain._nvrtc_at.cache_clear()
    assert by_name(doctor._compilers())["CUDA"].value == f"{library}: NVRTC 13.0"
    (tmp_path / "nvcc").touch(0o700)
    settings(nvcc=tmp_path / "nvcc")
    assert by_name(doctor._compilers())["CUDA"].value == f"{tmp_path / 'nvcc'}: nvcc's"
    toolchain._nvrtc_at.cache_clear()


def test_no_compiler_is_missing_both(bare):
    found = by_name(doctor._compilers())
    assert [found[name].status for name in ("C", "C++", "CUDA")] == ["missing", "missing", "note"]
    assert "No C compiler was found" in found["C"].value
    assert found.keys() == {"C", "C++", "CUDA", "Python.h"}


@pytest.mark.parametrize(("system", "mend"), [("Linux", "apt-get install g++"), ("Darwin", "xcode-select")])
def test_the_command_for_a_compiler_fits_the_system(bare, monkeypatch, system, mend):
    monkeypatch.setattr(platform, "system", lambda: system)
    assert mend in by_name(doctor._compilers())["C++"].fix


def test_the_compiler_of_a_setting_is_named(bare, settings, tmp_path):
    (tmp_path / "clang").write_text("#!/bin/sh\necho 'clang version 14.0.6'\n")
    (tmp_path / "clang").chmod(0o755)
    settings(cc=tmp_path / "clang", cxx="gone")
    found = by_name(doctor._compilers())
    assert (found["C"].status, found["C"].value) == ("ok", f"{tmp_path}/clang: clang version 14.0.6")
    assert "OPKIT_CXX='gone' names no program" in found["C++"].value


def test_python_without_its_headers(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    found = doctor._headers()
    assert found.status == "missing"
    assert "python3-dev" in (found.fix or "")


def test_triton_is_not_asked_for_where_it_has_no_release(monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert by_name(doctor._packages())["triton"].status == "note"
    assert "untested" in by_name(doctor._platform())["system"].value


def test_cache_folders(tmp_path):
    tmp_path.chmod(0o700)
    assert doctor._cache("opkit", tmp_path).value.endswith("(writable, mode 0700)")
    below = doctor._cache("opkit", tmp_path / "a" / "b")
    assert below.value.endswith("(not made yet)")
    assert below.status == "ok"
    assert not (tmp_path / "a").exists()


def test_a_file_in_the_way_of_a_cache_folder(tmp_path):
    (tmp_path / "file").write_text("")
    found = doctor._cache("opkit", tmp_path / "file" / "cache")
    assert found.status == "missing"
    assert "OPKIT_CACHE_DIR" in found.fix


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert doctor._cache("opkit", tmp_path).status == "missing"
    tmp_path.chmod(0o700)


def test_caches_follow_the_environment(monkeypatch, settings, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    settings(cache_dir=tmp_path / "opkit")
    found = by_name(doctor._caches())
    assert all(str(tmp_path / name) in found[name].value for name in ("opkit", "inductor", "triton"))


def test_a_probe_that_fails_is_a_finding(monkeypatch):
    def broken():
        raise OSError("no such device")
        yield

    monkeypatch.setattr(doctor, "_PROBES", (("gpus", broken),))
    (found,) = doctor.examine()
    assert (found.section, found.status) == ("gpus", "missing")
    assert "no such device" in found.value


@pytest.mark.gpu
def test_a_gpu_is_named():
    assert "sm_" in by_name(doctor._gpus())["cuda:0"].value
