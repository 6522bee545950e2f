"""``opkit cache``: what it lists, clears and verifies, and the status it ends with."""

import os
import re
import shutil
import time

import pytest
from typer.testing import CliRunner

from opkit import cli
from opkit.kernels import build_cache
from opkit.kernels.build_cache import CacheEntry
from opkit.kernels.cc import compilation
from opkit.kernels.cc.compilation import Request, Unit, build, key

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")

RUNNER = CliRunner()


def run(*arguments):
    return RUNNER.invoke(cli.app, ["cache", *arguments])


def make(label):
    return Request(label, (Unit("number.c", f"int number(void) {{ return {len(label)}; }}", "c"),))


@pytest.fixture
def place(tmp_path, settings, monkeypatch):
    """A cache of the test's own, in what looks like a new process."""
    settings(cache_dir=tmp_path / "cache")
    monkeypatch.setattr(compilation, "_verified", {})
    return tmp_path / "cache" / "native"


@pytest.mark.parametrize("command", ["list", "clear", "verify"])
def test_an_empty_cache(place, command):
    result = run(command)
    assert result.exit_code == 0
    assert re.search(r"0 kernels, 0 B|sound: 0, damaged: 0", result.stdout)
    assert not place.exists()


def test_list_prints_each_kernel_and_the_total(place):
    labels = ["zeta::z", "alpha::[red]a\n"]
    sizes = [build(make(label)).stat().st_size for label in labels]
    result = run("list")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert re.match(r"kernel +size +age +compiler +key", lines[0])
    assert re.match(rf"alpha::\[red\]a\\n +[\d.]+ KiB +\d s +gcc.*{key(make(labels[1]))[:12]}$", lines[1].rstrip())
    assert lines[2].startswith("zeta::z")
    assert lines[3].startswith(f"2 kernels, {sum(sizes) / 1024:.4g} KiB in ")
    assert str(place) in "".join(lines[3:])


def test_clear_says_how_much_was_removed(place):
    build(make("a::a"))
    (build(make("b::bb")).parent / "entry.json").unlink()
    result = run("clear")
    assert result.exit_code == 0
    assert re.match(r"Removed 1 kernel, [\d.]+ KiB, and 1 damaged, from ", result.stdout)
    assert not place.exists()


def test_clear_says_why_it_cannot(place, monkeypatch):
    build(make("a::a"))
    monkeypatch.setattr("opkit.kernels.build_cache.remove", lambda directory: os.rmdir(directory))
    result = run("clear")
    assert result.exit_code == 2
    assert "cannot be cleared" in result.stderr
    assert "Traceback" not in result.output


def test_verify_counts_what_is_sound(place):
    build(make("a::a"))
    build(make("b::bb"))
    result = run("verify")
    assert (result.exit_code, result.stdout.strip()) == (0, "sound: 2, damaged: 0")


def test_verify_names_what_is_damaged(place):
    build(make("a::a"))
    os.truncate(build(make("b::bb")), 3)
    (build(make("c::ccc")).parent / "entry.json").write_text("{")
    result = run("verify")
    assert result.exit_code == 1
    assert re.search(rf"{key(make('b::bb'))[:12]} +b::bb +kernel\.so has 3 bytes", result.stdout)
    assert re.search(rf"{key(make('c::ccc'))[:12]} +\? +entry\.json cannot be read", result.stdout)
    assert "sound: 1, damaged: 2; each is built again when it is needed" in result.stdout


def test_sizes_and_ages(place, monkeypatch):
    kept = [
        (12, -50),
        (2048, 75),
        (1500000, 8000),
        (3 * 2**30, 90000 * 3),
    ]  # a build's time may lie ahead of this clock
    made = [CacheEntry("k" * 64, "a::a", size, time.time() - age, place, "gcc 12", ()) for size, age in kept]
    monkeypatch.setattr(build_cache, "entries", lambda: made)
    shown = [re.split("  +", line)[1:3] for line in run("list").stdout.splitlines()[1:5]]
    assert shown == [["12 B", "0 s"], ["2 KiB", "1 min"], ["1.431 MiB", "2 h"], ["3 GiB", "3 days"]]


def test_without_a_command_it_helps():
    assert "verify" in run().output


def test_triton_kernels_are_counted_and_cleared(place):
    folder = place.parent / "triton" / "ab"
    folder.mkdir(parents=True)
    kept = [folder / ("ab" + digit * 62) for digit in "01"]
    for path in kept:
        path.write_bytes(b"x" * 1024)
    (folder / "of another").write_text("")
    assert "2 Triton kernels, 2 KiB" in run("list").stdout
    assert "Removed 2 Triton kernels" in run("clear").stdout
    assert [path.name for path in folder.iterdir()] == ["of another"]
    assert "Triton" not in run("list").stdout
