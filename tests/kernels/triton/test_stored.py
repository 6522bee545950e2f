"""Compiled kernels that outlive their process."""

import os
import subprocess
import sys
from pathlib import Path

import triton
import triton.language as tl
from triton import knobs

import opkit
from opkit.kernels.triton import stored
from opkit.kernels.triton.compiling import CompileRequest, build, identity


@triton.jit
def added(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)


REQUEST = CompileRequest(
    added,
    {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"},
    {"BLOCK": 128},
    frozenset({"x", "y", "out", "n"}),
)


def kept():
    key = stored.key(identity(REQUEST))
    assert key is not None
    return stored._path(key)


def test_the_second_process_does_not_ask_triton(compiled):
    first = build(REQUEST)
    assert build(REQUEST) == first
    assert len(compiled) == 1
    assert kept().stat().st_mode & 0o777 == 0o600


def test_what_is_not_as_it_was_written_is_not_trusted(compiled):
    first = build(REQUEST)
    for name, damage in {
        "other bytes": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"),
        "no fields": lambda path: path.write_bytes(b"{}\n"),
        "no JSON": lambda path: path.write_bytes(b"no line"),
        "a file of all": lambda path: path.chmod(0o666),
        "a link": lambda path: (path.rename(path.with_suffix(".own")), path.symlink_to(path.with_suffix(".own"))),
        "a folder of all": lambda path: path.parent.chmod(0o777),
    }.items():
        compiled.clear()
        damage(kept())
        assert build(REQUEST) == first, name
        assert len(compiled) == 1, name


def test_a_folder_that_cannot_be_written_to(compiled, tmp_path):
    (tmp_path / "cache").write_text("not a folder")
    assert build(REQUEST) == build(REQUEST)
    assert len(compiled) == 2


def test_triton_is_asked_where_it_is_told_to_compile(compiled, monkeypatch):
    build(REQUEST)
    monkeypatch.setattr(knobs.compilation, "always_compile", True)
    build(REQUEST)
    assert len(compiled) == 2


def test_the_environment_is_part_of_the_key(compiled, monkeypatch):
    before = kept()
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/somewhere/ptxas")
    assert kept() != before


def test_triton_s_own_cache_is_asked_alike_by_every_process(tmp_path):
    script = f"""
import sys, types
sys.modules["opkit"] = types.ModuleType("opkit")  # opkit/__init__.py would import torch
sys.modules["opkit"].__path__ = {[str(Path(opkit.__file__).parent)]!r}
from opkit.kernels.triton import compiling
from tests.kernels.triton.test_stored import REQUEST
backend = compiling._backend(compiling.targets.parse(REQUEST.target))
print(compiling._source(REQUEST, backend).hash())
"""
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])}
    command = [sys.executable, "-c", script]
    hashes = set()
    for seed in ("1", "2"):
        environment["PYTHONHASHSEED"] = seed
        found = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
        hashes.add(found.stdout)
    assert len(hashes) == 1
