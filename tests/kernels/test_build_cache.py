"""The build cache in good order: its layout, what it lists, clears and verifies, and whose files it trusts."""

import json
import os
import stat
import time

import pytest

from opkit import errors
from opkit.kernels import build_cache
from opkit.kernels.cc import build_plan, compilation
from opkit.kernels.cc.compilation import Request, Unit, build, key

TEXT = '__attribute__((visibility("default"))) int number(void) { return 7; }\n'


@pytest.fixture(autouse=True)
def place(tmp_path, settings, monkeypatch):
    """A cache of the test's own."""
    settings(cache_dir=tmp_path / "above" / "cache")
    monkeypatch.setattr(compilation, "_verified", {})
    monkeypatch.setattr(build_cache, "_swept", set())
    return tmp_path / "above" / "cache" / "native"


def make(label="demo::seven", text=TEXT):
    return Request(label, (Unit("seven.c", text, "c"),))


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_layout_and_the_modes(place):
    old = os.umask(0)
    try:
        path = build(make())
    finally:
        os.umask(old)
    name = key(make())
    assert path == place / name[:2] / name / "kernel.so"
    above = [path.parent, path.parent.parent, place, place.parent, place.parent.parent]
    assert [mode(folder) for folder in above] == [0o700] * 5
    assert mode(path) == 0o700
    assert mode(path.parent / "entry.json") == 0o600
    assert sorted(each.name for each in path.parent.iterdir()) == ["entry.json", "kernel.so"]
    assert list((place / "tmp").iterdir()) == []


def test_what_an_entry_says(place):
    start = time.time()
    path = build(make())
    noted = json.loads((path.parent / "entry.json").read_text())
    assert noted["label"] == "demo::seven"
    assert noted["size"] == path.stat().st_size
    assert noted["abi"] == build_plan.abi_version() == 1
    assert set(noted["compiler"]) == {"path", "version"}
    (entry,) = build_cache.entries()
    assert (entry.key, entry.label, entry.path, entry.size) == (key(make()), "demo::seven", path, noted["size"])
    assert start - 1 <= entry.created <= time.time()
    assert entry.compiler == noted["compiler"]["version"]
    assert "-O3" in entry.flags


def test_an_executable_is_kept_under_its_own_name():
    path = build(Request("demo::main", (Unit("main.c", "int main(void) { return 0; }", "c"),), kind="executable"))
    assert path.name == "kernel"
    assert os.access(path, os.X_OK)


def test_entries_come_by_label():
    for number, label in enumerate(["c::c", "a::a", "b::b"]):
        build(make(label, TEXT + "\n" * number))
    assert [entry.label for entry in build_cache.entries()] == ["a::a", "b::b", "c::c"]


def test_a_cache_that_is_not_there_is_empty(place):
    assert (build_cache.entries(), build_cache.verify(), build_cache.clear()) == ([], [], 0)
    assert not place.exists()


def test_clear_removes_all_that_is_the_caches(place, tmp_path):
    build(make())
    build(make(text=TEXT + "\n"))
    with pytest.raises(errors.CompileError):
        build(make(text="oops"))
    (place / "tmp" / "0123abcd-1-xyz").mkdir()
    (place / "tmp" / "0123abcd-1-xyz" / "unit0.c").write_text("")
    assert build_cache.clear() == 2
    assert not place.exists()
    assert (tmp_path / "above" / "cache").exists()
    assert build(make()).exists()


def test_clear_removes_nothing_else(place, tmp_path):
    path = build(make())
    outside = tmp_path / "outside"
    outside.mkdir()
    kept = [
        outside / "kernel.so",
        place / "notes.txt",
        place / "ab-mine" / "entry.json",
        place / "tmp" / "mine.txt",
        path.parent / "notes.txt",
        path.parent.parent / "mine.lock",
    ]
    for each in kept:
        each.parent.mkdir(exist_ok=True)
        each.write_text("mine")
    (place / "cd").symlink_to(outside)
    (path.parent.parent / ("0" * 64)).symlink_to(outside)
    build_cache.clear()
    assert all(each.read_text() == "mine" for each in kept)
    assert not path.exists()


def test_clear_says_so_where_it_cannot(place, monkeypatch):
    build(make())

    def refuse(directory):
        raise PermissionError(13, "Permission denied", str(directory))

    monkeypatch.setattr(build_cache, "remove", refuse)
    with pytest.raises(errors.CacheError, match=f"{place} cannot be cleared: .*Permission denied"):
        build_cache.clear()


def test_a_cache_can_be_cleared_while_it_is_built_in(tmp_path, settings):
    wrapper = tmp_path / "gcc"
    wrapper.write_text(f'#!/bin/sh\n[ -e {tmp_path}/go ] || {{ touch {tmp_path}/go; rm -rf "$PWD"; }}\nexec gcc "$@"\n')
    wrapper.chmod(0o755)
    settings(cache_dir=tmp_path / "other", cc=wrapper)
    assert build(make()).exists()
    assert (tmp_path / "go").exists()


def test_old_leftovers_are_swept_and_new_ones_stay(place):
    for name, age in {"00000000-old": 7200, "00000000-new": 10}.items():
        folder = place / "tmp" / name
        folder.mkdir(parents=True)
        (folder / "unit0.c").write_text("")
        os.utime(folder, (time.time() - age,) * 2)
    build(make())
    assert [each.name for each in (place / "tmp").iterdir()] == ["00000000-new"]


def test_few_failures_are_kept(place, monkeypatch):
    monkeypatch.setattr(build_cache, "_MAX_FAILED", 2)
    for number in range(4):
        with pytest.raises(errors.CompileError):
            build(make(text=f"oops {number}"))
    assert len(list((place / "failed").iterdir())) == 2
    assert build_cache.entries() == []


def test_an_entry_is_listed_under_any_label():
    label = 'a"b\n[red]c\x1b[0m;$(x)/../é'
    build(make(label))
    assert build_cache.entries()[0].label == label


def test_a_file_that_has_changed_is_noticed_by_a_process_that_has_seen_it():
    path = build(make())
    built = path.read_bytes()
    path.write_bytes(built[:-1] + bytes([built[-1] ^ 1]))
    with pytest.warns(errors.BuildCacheWarning, match="was damaged and is built again"):
        build(make())
    assert build_cache.verify() == []


def test_an_entry_without_a_field_is_damaged():
    path = build(make())
    noted = json.loads((path.parent / "entry.json").read_text())
    for wrong in ("label", "file", "sha256", "size", "created", "key"):
        left = {name: value for name, value in noted.items() if name != wrong}
        (path.parent / "entry.json").write_text(json.dumps(left))
        ((entry, problem),) = build_cache.verify()
        assert "does not describe a built file" in problem, wrong
        assert (entry.label, entry.key) == ("?", key(make())), wrong
        assert build_cache.entries() == [], wrong


def test_an_entry_names_no_file_but_its_own():
    path = build(make())
    noted = json.loads((path.parent / "entry.json").read_text())
    for name in ("../kernel.so", "/etc/passwd", "entry.json", "other.so"):
        (path.parent / "entry.json").write_text(json.dumps(noted | {"file": name}))
        assert "does not describe a built file" in build_cache.verify()[0][1], name


def test_the_entry_of_another_process_wins(place):
    path = build(make())
    before = path.stat().st_ino
    with build_cache.workspace(place, key(make())) as folder:
        (folder / "kernel.so").write_bytes(b"made at the same time")
        noted = {"label": "", "sha256": "", "size": 0}
        assert build_cache.store(place, key(make()), folder / "kernel.so", noted) == path
    assert path.stat().st_ino == before
    assert build_cache.verify() == []
