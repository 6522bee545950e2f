"""A build cache on a disk that is full, or that cannot be written to: kernels are built elsewhere, and it is said once."""

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

import opkit
from opkit import errors
from opkit.kernels import build_cache
from opkit.kernels.cc import compilation
from opkit.kernels.cc.compilation import Request, Unit, build

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")

TEXT = '__attribute__((visibility("default"))) int number(void) { return %d; }\n'


@pytest.fixture(autouse=True)
def settings(settings, tmp_path, monkeypatch):
    """A cache of the test's own, in what looks like a new process."""
    settings(cache_dir=tmp_path / "cache")
    monkeypatch.setattr(compilation, "_verified", {})
    monkeypatch.setattr(build_cache, "_instead", {})
    yield settings
    for folder in build_cache._instead.values():
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def mounted(folder, options):
    """A small file system in memory, or a skipped test where none may be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "opkit-test", str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, check=False) if shutil.which("mount") else None
    if run is None or run.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {run.stderr.strip() if run else 'there is no mount'}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def make(number=7):
    return Request("demo::number", (Unit("number.c", TEXT % number, "c"),))


def call(path):
    return ctypes.CDLL(str(path)).number()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kib", [4, 24, 64, 8, 16, 36, 200])
def test_a_full_disk(tmp_path, settings, kib):
    with mounted(tmp_path / "small", f"size={kib}k") as disk:
        settings(cache_dir=disk)
        with pytest.warns(errors.BuildCacheWarning, match=r"cannot be used \(.*\)\. Kernels of this process") as told:
            paths = [build(make(number)) for number in range(2 + kib // 16)]
        assert [call(path) for path in paths] == list(range(len(paths)))
        assert len(told) == 1
        assert build_cache.verify() == []
        assert not paths[-1].is_relative_to(disk)


def test_a_disk_without_room_for_another_file(tmp_path, settings):
    with mounted(tmp_path / "small", "size=1m,nr_inodes=6") as disk:
        settings(cache_dir=disk)
        with pytest.warns(errors.BuildCacheWarning, match="No space left"):
            assert call(build(make())) == 7


def test_a_full_disk_does_not_hide_an_error_of_the_author(tmp_path, settings):
    with mounted(tmp_path / "small", "size=8k") as disk:
        settings(cache_dir=disk)
        with pytest.warns(errors.BuildCacheWarning), pytest.raises(errors.CompileError, match="oops"):
            build(Request("demo::wrong", (Unit("wrong.c", "int oops = oops;", "c"),)))


def test_a_read_only_cache_is_read_and_not_written(tmp_path, settings):
    with mounted(tmp_path / "disk", "size=16m") as disk:
        settings(cache_dir=disk)
        old = build(make())
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        compilation._verified.clear()
        assert build(make()) == old  # and no warning
        with pytest.warns(errors.BuildCacheWarning, match="Read-only file system") as told:
            new = [build(make(8)), build(make(9)), build(make(8))]
        assert len(told) == 1
        assert [call(path) for path in new] == [8, 9, 8]
        assert new[0] == new[2] != new[1]
        with pytest.raises(errors.CacheError, match="cannot be cleared"):
            build_cache.clear()


def test_a_damaged_entry_of_a_read_only_cache(tmp_path, settings):
    with mounted(tmp_path / "disk", "size=16m") as disk:
        settings(cache_dir=disk)
        os.truncate(build(make()), 5)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        compilation._verified.clear()
        with pytest.warns(errors.BuildCacheWarning, match="Read-only file system"):
            assert call(build(make())) == 7


def test_a_file_in_the_place_of_the_cache(tmp_path, settings):
    (tmp_path / "file").write_text("")
    settings(cache_dir=tmp_path / "file" / "cache")
    with pytest.warns(errors.BuildCacheWarning, match="Not a directory"):
        path = build(make())
    assert call(path) == 7
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert build(make()) == path


def test_many_at_once_are_told_once(tmp_path, settings):
    (tmp_path / "file").write_text("")
    settings(cache_dir=tmp_path / "file" / "cache")
    with pytest.warns(errors.BuildCacheWarning) as told:
        results = compilation.build_all([make(number) for number in range(12)], jobs=6)
    assert len(told) == 1
    assert [call(path) for path in results] == list(range(12))


def test_nothing_can_be_written_at_all(tmp_path, settings, monkeypatch):
    (tmp_path / "file").write_text("")
    settings(cache_dir=tmp_path / "file" / "cache")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(errors.CacheError, match=r"Neither the build cache .* nor a temporary folder"):
        build(make())


def test_what_stands_in_for_the_cache_is_full_too(tmp_path, settings, monkeypatch):
    (tmp_path / "file").write_text("")
    settings(cache_dir=tmp_path / "file" / "cache")
    with mounted(tmp_path / "small", "size=8k") as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        with pytest.warns(errors.BuildCacheWarning), pytest.raises(errors.CacheError, match="stood in for"):
            build(make())


PROGRAM = f"""
import os, sys, types
sys.modules["opkit"] = types.ModuleType("opkit")
sys.modules["opkit"].__path__ = {[str(Path(opkit.__file__).parent)]!r}
from opkit.kernels.cc.compilation import Request, Unit, build
path = build(Request("demo::number", (Unit("number.c", {TEXT % 7!r}, "c"),)))
if os.fork() == 0:
    sys.exit()  # a child that ends in the usual way leaves the folder to its parent
os.wait()
print(path, path.exists())
"""


def test_what_stood_in_for_the_cache_is_removed_at_the_end(tmp_path):
    (tmp_path / "file").write_text("")
    environment = os.environ | {"OPKIT_CACHE_DIR": str(tmp_path / "file"), "TMPDIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment)
    path, existed = run.stdout.split()
    assert existed == "True"
    assert "BuildCacheWarning" in run.stderr
    assert not Path(path).exists()
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_warning_turned_into_an_error_does_not_stop_the_next_build(tmp_path, settings):
    (tmp_path / "file").write_text("")
    settings(cache_dir=tmp_path / "file" / "cache")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(errors.BuildCacheWarning):
            build(make())
        assert call(build(make())) == 7
