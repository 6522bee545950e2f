"""How the bridge comes to be: built once for each torch, in the background, kept in the cache; with a compiler of our own."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import fresh_process
import pytest

from opkit import config
from opkit.errors import CacheError, CompileError, ToolchainError
from opkit.kernels import bridge
from opkit.kernels.bridge import building

COPY = 'while [ $# -gt 1 ]; do [ "$1" = -o ] && echo built > "$2"; shift; done\n'


class Place:
    """A torch that is none, a compiler that is a shell script, and a cache."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self._patch = folder, patch
        (folder / "torch").mkdir(parents=True)
        for name in ("torch/library.h", "libtorch_cpu.so"):
            (folder / name).touch()
        self.paths = bridge.TorchPaths("2.99.0", "abc", folder, folder)
        self.ran, self.compiler = folder / "ran", folder / "compiler"
        self.settings()
        self.compile_by(COPY)

    def settings(self, **changes: object) -> None:
        given = {"cache_dir": self.folder / "cache", "cxx": str(self.compiler)} | changes
        settings = config.Settings(**given)
        self._patch.setattr(config, "get", lambda: settings)

    def compile_by(self, script: str) -> None:
        """Let the compiler do this. It is written in place: the entry's key looks at the size and time of the file."""
        self.compiler.write_text(f"#!/bin/sh\necho x >> '{self.ran}'\n{script}".ljust(400, "\n"))
        self.compiler.chmod(0o700)
        os.utime(self.compiler, ns=(1, 1))

    @property
    def runs(self) -> int:
        return len(self.ran.read_text().split()) if self.ran.exists() else 0

    def state(self) -> str:
        return bridge.status(self.paths).state


@pytest.fixture
def place(tmp_path, monkeypatch) -> Place:
    return Place(tmp_path / "here", monkeypatch)


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def ensure(place: Place) -> tuple[threading.Event, list[Path | None]]:
    ended, results = threading.Event(), []

    def done(path: Path | None) -> None:
        results.append(path)
        ended.set()

    assert bridge.ensure_in_background(place.paths, done)
    return ended, results


def test_it_is_built_once(place, capsys):
    assert place.state() == "absent"
    path = bridge.build(place.paths)
    assert path.read_text() == "built\n"
    assert "opkit: built the bridge to torch 2.99.0 in 0.0 s" in capsys.readouterr().err
    assert bridge.build(place.paths) == path
    assert place.runs == 1
    assert bridge.status(place.paths) == bridge.Status("built", building.entry(place.paths).record()["seconds"])
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert {file.name for file in path.parent.iterdir()} <= {"bridge.so", "record.json", "lock"}


def test_names_are_never_read_by_a_shell(tmp_path, monkeypatch):
    place = Place(tmp_path / 'a b;%s$(exit 1)\n"*', monkeypatch)
    ended, results = ensure(place)
    assert ended.wait(120)
    assert results == [building.cached(place.paths)]
    assert results[0] is not None


def test_the_key_covers_what_decides(place):
    before = building.entry(place.paths).folder
    for change in ("version", "git_version", "include_dir", "library_dir", "cxx11_abi"):
        paths = dataclasses.replace(place.paths, **{change: False if change == "cxx11_abi" else Path("other")})
        assert building.entry(paths).folder != before, change
    assert building.entry(place.paths).folder == before
    os.utime(place.compiler, ns=(2, 2))
    assert building.entry(place.paths).folder != before


def flip(path: Path) -> None:
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        lambda path: path.write_bytes(path.read_bytes()[:3]),
        lambda path: path.chmod(0o666),
        lambda path: path.parent.chmod(0o777),
        lambda path: path.with_name("record.json").write_text("{"),
        lambda path: path.with_name("record.json").unlink(),
    ],
)
def test_a_damaged_entry_is_built_again(place, damage):
    path = bridge.build(place.paths)
    damage(path)
    assert place.state() == "absent"
    assert bridge.load(place.paths, 0) is None
    assert bridge.build(place.paths) == path
    assert (place.state(), place.runs) == ("built", 2)


def test_a_failure_is_remembered(place):
    place.compile_by("echo no such header >&2; exit 1")
    with pytest.raises(CompileError, match="no such header"):
        bridge.build(place.paths)
    assert place.state() == "failed"
    assert "no such header" in bridge.status(place.paths).log
    assert not bridge.ensure_in_background(place.paths)
    place.compile_by(COPY)
    bridge.build(place.paths)  # asked for, it is tried again
    assert place.state() == "built"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


def test_a_compiler_that_hangs_is_stopped(place):
    pid = place.folder / "pid"
    place.compile_by(f"sleep 600 & echo $! > '{pid}'; wait")
    place.settings(build_timeout=0.3)
    with pytest.raises(CompileError, match=r"within 0\.3 s"):
        bridge.build(place.paths)
    until(lambda: not alive(int(pid.read_text())))
    assert place.state() == "failed"


def test_what_cannot_be_built(place):
    place.settings(cxx="/no/compiler")
    with pytest.raises(ToolchainError, match="tried: /no/compiler"):
        bridge.build(place.paths)
    assert bridge.status(place.paths).state == "absent"
    assert "OPKIT_CXX" in bridge.status(place.paths).log
    assert not bridge.ensure_in_background(place.paths)
    place.settings()
    (place.folder / "torch" / "library.h").unlink()
    assert "has no" in bridge.status(place.paths).log
    assert not bridge.ensure_in_background(place.paths)
    with pytest.raises(ToolchainError, match=r"library\.h"):
        bridge.build(place.paths)


def test_a_cache_that_cannot_be_used(place):
    place.settings(cache_dir=place.compiler / "in a file")
    with pytest.raises(CacheError, match="in a file"):
        bridge.build(place.paths)
    assert not bridge.ensure_in_background(place.paths)
    assert place.state() == "absent"


def test_switched_off(place):
    bridge.build(place.paths)
    place.settings(bridge=False)
    assert place.state() == "off"
    assert building.cached(place.paths) is None
    assert not bridge.ensure_in_background(place.paths)


def test_a_library_that_cannot_be_loaded_is_a_failure(place):
    bridge.build(place.paths)
    assert bridge.load(place.paths, 0) is None
    assert place.state() == "failed"
    assert "cannot be used" in bridge.status(place.paths).log


# ---- in the background ----------------------------------------------------------------------------------------------


def test_in_the_background(place, capfd):
    ended, results = ensure(place)
    assert "building the bridge to torch 2.99.0 in the background (once; about 10 s)" in capfd.readouterr().err
    assert ended.wait(120)
    assert results == [building.cached(place.paths)]
    assert results[0] is not None
    assert not bridge.ensure_in_background(place.paths)
    assert capfd.readouterr().err == ""


def test_a_failure_in_the_background(place):
    place.compile_by("exit 3")
    ended, results = ensure(place)
    assert ended.wait(120)
    assert results == [None]
    assert place.state() == "failed"
    assert not bridge.ensure_in_background(place.paths)


def test_two_that_want_it_build_it_once(place, capfd):
    go = place.folder / "go"
    place.compile_by(f"while [ ! -e '{go}' ]; do sleep 0.01; done\n{COPY}")
    first, _ = ensure(place)
    until(lambda: place.state() == "building" and place.runs == 1)
    second, results = ensure(place)
    assert capfd.readouterr().err.count("building the bridge") == 1
    go.touch()
    assert first.wait(120)
    assert second.wait(120)
    assert results[0] is not None
    assert place.runs == 1


def test_a_build_that_was_killed_is_built_again(place):
    place.compile_by("exec sleep 600")
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    class Recorded(real):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", Recorded)
        ended, results = ensure(place)
    until(lambda: place.state() == "building" and place.runs == 1)
    os.killpg(started[0].pid, signal.SIGKILL)
    assert ended.wait(120)
    assert results == [None]
    assert place.state() == "absent"
    folder = building.entry(place.paths).folder
    assert list(folder.glob("tmp*"))
    place.compile_by(COPY)
    bridge.build(place.paths)
    assert not list(folder.glob("tmp*"))


def test_it_outlives_a_short_program(place):
    go = place.folder / "go"
    place.compile_by(f"while [ ! -e '{go}' ]; do sleep 0.01; done\n{COPY}")
    code = (
        "import sys; from pathlib import Path; from opkit.kernels import bridge\n"
        "paths = bridge.TorchPaths('2.99.0', 'abc', Path(sys.argv[1]), Path(sys.argv[1]))\n"
        "assert bridge.ensure_in_background(paths)"
    )
    settings = {"OPKIT_CACHE_DIR": str(config.get().cache_dir), "OPKIT_CXX": str(place.compiler)}
    fresh_process.run(["-c", code, str(place.folder)], os.environ | settings, cwd=place.folder)
    assert place.state() in ("building", "absent")
    go.touch()
    until(lambda: place.state() == "built")
