"""What the build survives: many builders at once, damaged entries, names of all kinds, compilers that hang or fail."""

import ctypes
import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import filelock
import pytest

import opkit
from opkit import errors
from opkit.kernels import build_cache, cache_files
from opkit.kernels.cc import compilation
from opkit.kernels.cc.compilation import Request, Unit, build, key

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")

TEXT = '__attribute__((visibility("default"))) int number(void) { return %d; }\n'

# What a child runs first: opkit.kernels without torch, which opkit/__init__.py would import.
STUB = f"""
import sys, types
sys.modules["opkit"] = types.ModuleType("opkit")
sys.modules["opkit"].__path__ = {[str(Path(opkit.__file__).parent)]!r}
from opkit.kernels.cc import compilation
from opkit.kernels import build_cache
from opkit.kernels.cc.compilation import Request, Unit, build
TEXT = {TEXT!r}
"""


@pytest.fixture(autouse=True)
def settings(settings, tmp_path, monkeypatch):
    """A cache of the test's own, in what looks like a new process; ``settings(cc=...)`` sets more."""
    settings(cache_dir=tmp_path / "cache")
    monkeypatch.setattr(compilation, "_verified", {})
    monkeypatch.setattr(build_cache, "_instead", {})
    return settings


def make(number=7, **more):
    return Request("demo::number", (Unit("number.c", TEXT % number, "c"),), **more)


def call(path):
    return ctypes.CDLL(str(path)).number()


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def child(program, *arguments, **variables):
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    command = [sys.executable, "-c", STUB + program, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


# ---- many at once ----------------------------------------------------------------------------------------------------

MANY = """
import threading
barrier, paths = threading.Barrier(8), []
def work():
    barrier.wait()
    paths.append(build(Request("demo::number", (Unit("number.c", TEXT % 7, "c"),))))
threads = [threading.Thread(target=work) for _ in range(8)]
print("ready", flush=True); sys.stdin.readline()
for each in threads: each.start()
for each in threads: each.join()
print(*paths, sep="\\n")
"""


def test_two_processes_of_eight_threads_compile_once(tmp_path):
    count = 'case " $* " in *" -o "*) echo >> "$COUNT"; sleep 0.2;; esac\nexec gcc "$@"'
    compiler = script(tmp_path / "gcc", count)
    variables = {"OPKIT_CACHE_DIR": tmp_path / "cache", "OPKIT_CC": compiler, "COUNT": tmp_path / "count"}
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen([sys.executable, "-c", STUB + MANY], env=environment, **pipes) for _ in range(2)]
    for each in children:
        assert each.stdout.readline() == "ready\n"
    for each in children:
        each.stdin.write("\n")
        each.stdin.flush()
    outputs = [each.communicate(timeout=300)[0].split() for each in children]
    assert [each.returncode for each in children] == [0, 0]
    assert [len(paths) for paths in outputs] == [8, 8]
    assert len({path for paths in outputs for path in paths}) == 1
    assert (tmp_path / "count").read_text() == "\n"
    assert call(outputs[0][0]) == 7


KILLED = """
import ctypes, os, random, signal, sys, time
draw, killed = random.Random(3), 0
build(Request("demo::first", (Unit("first.c", TEXT % 1, "c"),)))
for number in range(int(sys.argv[1])):
    request = Request("demo::number", (Unit("number.c", TEXT % (1000 + number), "c"),))
    pid = os.fork()
    if pid == 0:
        build(request)
        os._exit(0)
    time.sleep(draw.uniform(0, 0.06))
    os.kill(pid, signal.SIGKILL)
    killed += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert build_cache.verify() == [], build_cache.verify()
    assert ctypes.CDLL(str(build(request))).number() == 1000 + number
    assert build_cache.verify() == []
print(killed)
"""


@pytest.mark.parametrize("times", [10, pytest.param(50, marks=pytest.mark.exhaustive)])
def test_a_process_killed_at_random_points(tmp_path, times):
    process = child(KILLED, times, OPKIT_CACHE_DIR=tmp_path / "cache")
    output, complaints = process.communicate(timeout=300)
    assert process.returncode == 0, complaints
    told = [line for line in complaints.splitlines() if not line.startswith("opkit: buil")]  # a slow build says so
    assert told == []  # no warning either: nothing partial was ever found
    assert int(output) >= times // 5  # else the machine was so quick that the test tests nothing
    assert len(build_cache.entries()) == times + 1


# ---- damage ----------------------------------------------------------------------------------------------------------


def other_entry(folder):
    """The whole of another kernel's entry in this one's place."""
    other = build(make(8)).parent
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


def link_out(folder):
    """A link to a good file elsewhere."""
    (folder / "kernel.so").rename(folder.parent / "elsewhere.so")
    (folder / "kernel.so").symlink_to(folder.parent / "elsewhere.so")


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def become_link(folder):
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to(folder.parent / "elsewhere")


DAMAGE = {
    "truncated": (lambda folder: os.truncate(folder / "kernel.so", 100), "has 100 bytes"),
    "bit-flipped": (lambda folder: flip(folder / "kernel.so"), "sha256 differs"),
    "deleted file": (lambda folder: (folder / "kernel.so").unlink(), "kernel.so is missing"),
    "deleted entry.json": (lambda folder: (folder / "entry.json").unlink(), "entry.json is missing"),
    "truncated entry.json": (lambda folder: os.truncate(folder / "entry.json", 20), "cannot be read as JSON"),
    "list in entry.json": (lambda folder: (folder / "entry.json").write_text("[]"), "does not describe"),
    "world-writable file": (lambda folder: (folder / "kernel.so").chmod(0o777), "written to by others"),
    "world-writable folder": (lambda folder: folder.chmod(0o777), "written to by others"),
    "another kernel's entry": (other_entry, "that of another entry"),
    "linked file": (link_out, "kernel.so"),
    "linked folder": (become_link, "is not a file or folder"),
    "pipe": (lambda folder: ((folder / "kernel.so").unlink(), os.mkfifo(folder / "kernel.so")), "is not a file"),
    # These say little beyond the twelve above.
    "emptied": (lambda folder: os.truncate(folder / "kernel.so", 0), "has 0 bytes"),
    "deep entry.json": (lambda folder: (folder / "entry.json").write_text("[" * 99999), "cannot be read as JSON"),
    "binary entry.json": (lambda folder: (folder / "entry.json").write_bytes(b"\xff\xfe\0"), "cannot be read as JSON"),
    "group-writable file": (lambda folder: (folder / "kernel.so").chmod(0o770), "written to by others"),
    "world-writable entry.json": (lambda folder: (folder / "entry.json").chmod(0o666), "written to by others"),
}


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_entry_is_noticed_told_of_and_built_again(name, monkeypatch):
    damage, problem = DAMAGE[name]
    path = build(make())
    damage(path.parent)
    ((entry, found),) = build_cache.verify()
    assert problem in found
    assert entry.key == key(make())
    monkeypatch.setattr(compilation, "_verified", {})
    with pytest.warns(errors.BuildCacheWarning, match="was damaged and is built again") as told:
        assert call(build(make())) == 7
    assert problem in str(told[0].message)
    assert len(told) == 1
    assert build_cache.verify() == []


@needs_root
@pytest.mark.parametrize("part", ["kernel.so", "entry.json", "."])
def test_an_entry_of_another_user_is_not_trusted(part, monkeypatch):
    path = build(make())
    os.chown(path.parent / part, 12345, -1)
    monkeypatch.setattr(compilation, "_verified", {})
    with pytest.warns(errors.BuildCacheWarning, match="belongs to another user"):
        assert build(make()).stat().st_uid == os.geteuid()


def test_a_cache_that_others_may_write_to_is_closed():
    path = build(make())
    for folder in (path.parent.parent, path.parent.parent.parent):
        folder.chmod(0o777)
    compilation._verified.clear()
    assert "written to by others" in build_cache.verify()[0][1]
    assert build(make()) == path
    assert build_cache.verify() == []


@needs_root
def test_a_cache_of_another_user_is_left_alone(tmp_path):
    (tmp_path / "cache" / "native").mkdir(parents=True)
    os.chown(tmp_path / "cache" / "native", 12345, -1)
    with pytest.warns(errors.BuildCacheWarning, match="it belongs to another user"):
        path = build(make())
    assert call(path) == 7
    assert list((tmp_path / "cache" / "native").iterdir()) == []


# ---- names -----------------------------------------------------------------------------------------------------------

AWKWARD = [
    "a b;$(touch {pwned})",
    'a"b',
    "a\nb",
    "../../up",
    "@file",
    "é\u202e\x1b[0m",
    "a'b",
    "`touch {pwned}`",
    "-o",
    "%s\\",
]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("form", AWKWARD)
@pytest.mark.parametrize("compiler", [each for each in ("gcc", "clang") if shutil.which(each)])
def test_names_and_sources_of_all_kinds(settings, tmp_path, form, compiler):
    name = form.format(pwned=tmp_path / "pwned")
    folder = tmp_path / name.replace("/", "_")
    folder.mkdir()
    (folder / "number.h").write_text("#define NUMBER 7\n")
    settings(cc=compiler, cache_dir=folder / "cache")
    quoted = '"' + "".join(f"\\{ord(each):03o}" if ord(each) < 128 else each for each in name) + '"'
    text = f"#include <number.h>\n#line 5 {quoted}\nconst char* file = __FILE__;\n{TEXT.replace('%d', 'NUMBER')}"
    text += f"const char* value = X;\n/* {name} */\n"
    request = Request(name, (Unit(name, text, "c"),), flags=(f"-DX={quoted}",), include_dirs=(folder,))
    assert call(build(request)) == 7
    assert build_cache.entries()[0].label == name
    wrong = dataclasses.replace(request, units=(Unit(name, text + "int wrong = nothing;\n", "c"),))
    with pytest.raises(errors.CompileError) as raised:
        build(wrong)
    assert "int wrong = nothing;" in str(raised.value)
    assert "\x1b" not in str(raised.value)
    assert not (tmp_path / "pwned").exists()


# ---- compilers -------------------------------------------------------------------------------------------------------


def test_a_compiler_that_hangs_is_stopped_with_all_that_it_started(settings, tmp_path):
    pids = tmp_path / "pids"
    compiler = script(tmp_path / "gcc", f"sleep 600 &\necho $$ $! > {pids}; echo working\nwait")
    settings(cc=compiler, build_timeout=0.3)
    with pytest.raises(errors.CompileError, match=r"gcc was stopped: .* time limit \(OPKIT_BUILD_TIMEOUT\)") as raised:
        build(make())
    assert vars(raised.value)["log"] == "working\n"
    wait_for(
        lambda: not any(alive(int(pid)) for pid in pids.read_text().split())
    )  # what was killed dies in its own time
    assert build_cache.entries() == []


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.01)


def alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.fixture
def interruptible():
    """Python takes interruptions, also where it was started in the background by a shell that has it ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_build_leaves_no_compiler_behind(settings, tmp_path):
    pids = tmp_path / "pids"
    settings(cc=script(tmp_path / "gcc", f"echo $$ > {pids}; exec sleep 600"))

    def interrupt():
        while not (pids.exists() and pids.read_text()):
            time.sleep(0.01)
        time.sleep(0.1)  # until it is certain that subprocess, which an interruption would upset, is done
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        build(make())
    assert not alive(int(pids.read_text()))
    assert list((build_cache.root() / "tmp").iterdir()) == []


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_build_of_many_leaves_no_compiler_behind(settings, tmp_path):
    settings(cc=script(tmp_path / "gcc", f"echo $$ > {tmp_path}/pid$$; exec sleep 600"))

    def interrupt():
        while len(list(tmp_path.glob("pid*"))) < 2:
            time.sleep(0.01)
        time.sleep(0.1)  # until it is certain that subprocess, which an interruption would upset, is done
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        compilation.build_all([make(number) for number in range(6)], jobs=2)
    assert not any(alive(int(path.name[3:])) for path in tmp_path.glob("pid*"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("echo 'something went wrong'; exit 3", "something went wrong"),
        ("kill -SEGV $$", "gcc was ended by signal 11"),
        ("exit 0", "gcc reported success and wrote no file"),
    ],
)
def test_a_compiler_that_fails(settings, tmp_path, text, complaint):
    settings(cc=script(tmp_path / "gcc", text))
    for _ in range(2):  # a failure is not remembered
        with pytest.raises(errors.CompileError, match=complaint):
            build(make())
    assert build_cache.entries() == []
    settings(cc="")
    assert call(build(make())) == 7


def test_a_compiler_that_cannot_be_started(settings, tmp_path):
    (tmp_path / "gcc").write_bytes(b"\x7fELF nonsense")
    (tmp_path / "gcc").chmod(0o755)
    settings(cc=str(tmp_path / "gcc"))
    with pytest.raises(errors.ToolchainError, match="gcc cannot be started: Exec format error"):
        build(make())


def test_no_compiler_at_all(monkeypatch, tmp_path):
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(errors.ToolchainError, match="No C compiler was found"):
        build(make())
    assert not (tmp_path / "cache").exists()


def test_one_that_fails_does_not_hold_up_the_others():
    wrong = Request("demo::wrong", (Unit("wrong.c", "oops", "c"),))
    requests = [wrong if number % 3 == 0 else make(number) for number in range(9)]
    results = compilation.build_all(requests, jobs=3)
    assert [isinstance(each, errors.CompileError) for each in results] == [number % 3 == 0 for number in range(9)]
    assert [call(path) for path in results if isinstance(path, Path)] == [1, 2, 4, 5, 7, 8]


def test_threads_that_build_different_kernels():
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda number: call(build(make(number))), range(16))) == list(range(16))


def test_a_lock_that_is_held_for_ever_is_done_without(settings, monkeypatch):
    settings(build_timeout=100)
    minutes = itertools.count(step=60)  # the time that a builder waits is over soon, and that of the compiler is not
    clock = types.SimpleNamespace(time=time.time, monotonic=lambda: next(minutes))
    monkeypatch.setattr(cache_files, "time", clock)
    name = key(make())
    (build_cache.root() / name[:2]).mkdir(parents=True, mode=0o700)
    with filelock.FileLock(build_cache.root() / name[:2] / f"{name}.lock"):
        assert call(build(make())) == 7


def test_entries_are_plain_json():
    path = build(make())
    assert json.loads((path.parent / "entry.json").read_text("ascii"))["key"] == key(make())
