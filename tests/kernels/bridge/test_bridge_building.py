"""How the bridge comes to be: built once for each torch by command, stored in the build cache, loaded by later processes."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from pathlib import Path

import pytest

from opkit import config
from opkit.errors import CacheError, CompileError, ToolchainError
from opkit.kernels import bridge, build_cache
from opkit.kernels.cc import compilation
from opkit.op.torch_private import torch_paths


@pytest.fixture
def here(tmp_path, settings, monkeypatch) -> Path:
    """A build cache of the test's own."""
    settings(cache_dir=tmp_path / "cache")
    monkeypatch.setattr(compilation, "_verified", {})
    monkeypatch.setattr(build_cache, "_instead", {})
    return tmp_path


@pytest.fixture
def wrong(here) -> bridge.TorchPaths:
    """A torch whose headers are empty, so that compiling against them fails at once."""
    (here / "torch").mkdir()
    for name in ("torch/library.h", "libtorch_cpu.so"):
        (here / name).touch()
    return bridge.TorchPaths("2.99.0", "abc", here, here)


def put(paths: bridge.TorchPaths, content: bytes) -> Path:
    """Store a file as the bridge to this torch, as if it had been built."""
    key = compilation.key(bridge.request_for(paths))
    noted = {"label": "bridge", "sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    with build_cache.workspace(build_cache.root(), key) as folder:
        (folder / "kernel.so").write_bytes(content)
        (build_cache.root() / key[:2]).mkdir(mode=0o700, exist_ok=True)
        return build_cache.store(build_cache.root(), key, folder / "kernel.so", noted)


def test_it_is_built_once_into_the_build_cache(built):
    with pytest.MonkeyPatch.context() as patch:
        settings = config.Settings(cache_dir=built[1].parents[3])
        patch.setattr(config, "get", lambda: settings)
        patch.setattr(compilation, "_make", None)
        assert bridge.build(torch_paths()) == built[1]
        assert bridge.status(torch_paths()) == bridge.Status("built")
        assert [entry.path for entry in build_cache.entries() if entry.label.startswith("bridge to torch")] == [
            built[1]
        ]


def test_a_library_that_is_not_there_is_never_built(wrong, caplog):
    with caplog.at_level(logging.INFO, "opkit.bridge"):
        assert bridge.load(wrong, 0) is None
    assert "Run `opkit bridge` once" in caplog.text
    assert bridge.status(wrong) == bridge.Status("absent")
    assert not build_cache.root().exists()


def test_a_compiler_that_fails_says_why(wrong):
    with pytest.raises(CompileError, match=r"bridge\.cpp"):
        bridge.build(wrong)
    assert bridge.status(wrong).state == "absent"


def test_the_key_covers_what_decides(wrong):
    keys = {compilation.key(bridge.request_for(wrong))}
    folder = Path("/other")
    changes = {"version": "2", "git_version": "b", "include_dir": folder, "library_dir": folder, "cxx11_abi": False}
    for change, value in changes.items():
        other = dataclasses.replace(wrong, **{change: value})
        keys.add(compilation.key(bridge.request_for(other)))
    assert len(keys) == 6


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"x"), lambda path: path.chmod(0o666)])
def test_a_damaged_library_is_not_loaded(wrong, damage):
    path = put(wrong, b"no library")
    assert bridge.status(wrong).state == "built"
    damage(path)
    compilation._verified.clear()
    assert bridge.status(wrong).state == "absent"
    assert bridge.load(wrong, 0) is None


def test_a_library_that_cannot_be_loaded_is_logged(wrong, caplog):
    put(wrong, b"no library")
    assert bridge.load(wrong, 0) is None
    assert "The bridge to torch 2.99.0 cannot be used" in caplog.text


def test_what_cannot_be_built(wrong, here, settings):
    settings(cache_dir=here / "cache", cxx="/no/compiler")
    with pytest.raises(ToolchainError, match="/no/compiler"):
        bridge.build(wrong)
    assert bridge.load(wrong, 0) is None
    assert "OPKIT_CXX" in bridge.status(wrong).reason
    settings(cache_dir=here / "cache", cxx="g++")
    (here / "torch" / "library.h").unlink()
    assert "has no" in bridge.status(wrong).reason
    with pytest.raises(ToolchainError, match=r"library\.h"):
        bridge.build(wrong)


def test_a_bridge_outside_of_the_cache_is_refused(wrong, here, monkeypatch):
    monkeypatch.setattr(compilation, "build", lambda request: here / "elsewhere" / "kernel.so")
    with pytest.raises(CacheError, match="cannot be stored in the build cache"):
        bridge.build(wrong)


def test_switched_off(wrong, here, settings):
    put(wrong, b"no library")
    settings(cache_dir=here / "cache", bridge=0)
    assert bridge.status(wrong) == bridge.Status("off", "OPKIT_BRIDGE=0")
    assert bridge.cached(wrong) is None
