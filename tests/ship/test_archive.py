"""Damaged and hostile files are refused."""

import copy
import hashlib
import json
import random
import struct
import zipfile

import pytest
import torch
from torch import nn

import opkit
import opkit.runtime
from opkit.errors import ModelFileError
from opkit.ship import archive


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).eval()
    x = torch.randn(3, 4)
    path = opkit.export(model, (x,), path=tmp_path_factory.mktemp("saved") / "model.opk")
    return path.read_bytes(), x, model(x).detach()


def mutated(content: bytes, rng: random.Random) -> bytes:
    """A file with some bytes changed, cut off, inserted, or moved."""
    changed, at = bytearray(content), rng.randrange(len(content))
    length = rng.randrange(1, 64)
    kind = rng.randrange(6)
    if kind == 0:
        changed[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del changed[at:]
    elif kind == 2:
        del changed[at : at + length]
    elif kind == 3:
        changed[at:at] = rng.randbytes(length)
    elif kind == 4:
        changed[at : at + length] = rng.randbytes(min(length, len(changed) - at))
    else:
        changed[at : at + length] = b"\xff" * min(length, len(changed) - at)
    return bytes(changed)


LOADERS = {"torch": opkit.load, "runtime": opkit.runtime.load}
"""The two readers of files: in Python, and in C++."""


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_mutated_files(saved, tmp_path, count, loader):
    content, x, expected = saved
    rng, refused = random.Random(count), 0
    for _ in range(count):
        (tmp_path / "model.opk").write_bytes(mutated(content, rng))
        try:
            loaded = LOADERS[loader](tmp_path / "model.opk")
        except ModelFileError:
            refused += 1
        else:  # what changed is no part of any member
            torch.testing.assert_close(torch.from_dlpack(loaded(x)), expected)
    assert refused > 0.9 * count


def rewritten(content, path, change):
    """Write the file again, with right checksums, after ``change`` of its manifest and members."""
    path.write_bytes(content)
    with zipfile.ZipFile(path) as opened:
        members = {info.filename: opened.read(info) for info in opened.infolist()}
    manifest = json.loads(members.pop("manifest.json"))
    change(manifest, members)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as made:
        for name, each in members.items():
            if name in manifest["members"]:
                manifest["members"][name] = [len(each), hashlib.sha256(each).hexdigest()]
            made.writestr(name, each)
        text = json.dumps(manifest).encode()
        made.writestr("manifest.json", text)
        made.comment = f"opkit model, sha256 {hashlib.sha256(text).hexdigest()}".encode()


def set_header(members, change):
    whole = members[archive.WEIGHTS]
    (length,) = struct.unpack_from("<Q", whole)
    header = json.loads(whole[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode().ljust(length)
    members[archive.WEIGHTS] = struct.pack("<Q", len(text)) + text + whole[8 + length :]


def set_plan(members, change, file="plan.json"):
    name = next(name for name in members if name.endswith(file))
    plan = json.loads(members[name])
    change(plan)
    members[name] = json.dumps(plan).encode()


def set_program(members, change):
    set_plan(members, change, "program.json")


def first(header):
    return next(entry for name, entry in header.items() if not name.startswith("padding"))


HOSTILE = {
    "no comment": None,
    "format": lambda manifest, members: manifest.update(format=99),
    "no entries": lambda manifest, members: manifest.pop("entries"),
    "a folder outside": lambda manifest, members: manifest["entries"][""]["variants"][0].update(folder="../../etc"),
    "a header that is too long": lambda manifest, members: members.update({
        archive.WEIGHTS: struct.pack("<Q", 1 << 62) + members[archive.WEIGHTS][8:]
    }),
    "sizes that overflow": lambda manifest, members: set_header(
        members, lambda header: first(header).update(shape=[1 << 62, 1 << 62])
    ),
    "sizes below 0": lambda manifest, members: set_header(members, lambda header: first(header).update(shape=[-1, -8])),
    "a weight outside": lambda manifest, members: set_header(
        members, lambda header: first(header).update(data_offsets=[1 << 40, (1 << 40) + 32])
    ),
    "a view outside": lambda manifest, members: set_plan(
        members, lambda plan: next(iter(plan["constants"].values())).update(strides=[1 << 40])
    ),
    "a weight that is none": lambda manifest, members: set_plan(
        members, lambda plan: next(iter(plan["constants"].values())).update(at="none")
    ),
    "a class that is none": lambda manifest, members: set_plan(members, lambda plan: plan.update(plan=["os.system", "true"])),
    "no plan": lambda manifest, members: set_plan(members, lambda plan: plan.update(plan=["tuple", 1])),
    "no library": lambda manifest, members: members.update({n: b"ELF" for n in members if n.endswith(".so")}),
    "nested lists": lambda manifest, members: set_plan(members, lambda plan: plan.update(plan=nested(900))),
}  # fmt: skip


def nested(depth):
    found = ["tuple"]
    for _ in range(depth):
        found = ["tuple", found]
    return found


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files(saved, tmp_path, case):
    path = tmp_path / "model.opk"
    if HOSTILE[case] is None:
        with zipfile.ZipFile(path, "w") as made:
            made.writestr("manifest.json", "{}")
    else:
        rewritten(saved[0], path, HOSTILE[case])
    with pytest.raises(ModelFileError, match=r"model\.opk"):
        opkit.load(path)


HOSTILE_PROGRAMS = {name: HOSTILE[name] for name in list(HOSTILE)[:8]} | {
    "a constant outside": lambda manifest, members: set_program(
        members, lambda program: program["constants"][0].update(strides=[1 << 40])
    ),
    "a constant of sizes that overflow": lambda manifest, members: set_program(
        members, lambda program: program["constants"][0].update(shape=[1 << 62] * 2, strides=[1 << 62] * 2)
    ),
    "a constant that is none": lambda manifest, members: set_program(
        members, lambda program: program["constants"][0].update(at="none")
    ),
    "another version": lambda manifest, members: set_program(members, lambda program: program.update(version=99)),
    "a size of no input": lambda manifest, members: set_program(
        members, lambda program: program.update(sizes=1, bound=[[0, "s0", 7, "size", 0]])
    ),
    "an operator that is none": lambda manifest, members: set_program(
        members, lambda program: program.update(operators=[["none", "none"]])
    ),
    "a function that is none": lambda manifest, members: set_program(
        members, lambda program: program.update(functions=[["libnone.so", "none", -1]])
    ),
    "no program": lambda manifest, members: set_program(members, lambda program: program.clear()),
    "an array for an object": lambda manifest, members: members.update({
        name: b"[1]" for name in members if name.endswith("program.json")
    }),
    "nested arrays": lambda manifest, members: members.update({
        name: b"[" * 5000 for name in members if name.endswith("program.json")
    }),
    "no library": HOSTILE["no library"],
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE_PROGRAMS)
def test_hostile_files_without_torch(saved, tmp_path, case):
    path = tmp_path / "model.opk"
    if HOSTILE_PROGRAMS[case] is None:
        with zipfile.ZipFile(path, "w") as made:
            made.writestr("manifest.json", "{}")
    else:
        rewritten(saved[0], path, HOSTILE_PROGRAMS[case])
    with pytest.raises(ModelFileError, match=r"model\.opk"):
        opkit.runtime.load(path)


def graphs(manifest):
    return manifest["entries"][""]["variants"][0]["graphs"]


def nest(manifest, members):
    for _ in range(40):
        found = graphs(manifest)
        found["module true_graph_0"]["variants"][0]["graphs"] = copy.deepcopy(found)


HOSTILE_GRAPHS = {
    "no graphs": lambda manifest, members: manifest["entries"][""]["variants"][0].pop("graphs"),
    "a graph that is missing": lambda manifest, members: graphs(manifest).popitem(),
    "a graph of another folder": lambda manifest, members: graphs(manifest)["module true_graph_0"]["variants"][
        0
    ].update(folder="../../etc"),
    "a graph without variants": lambda manifest, members: graphs(manifest)["module true_graph_0"].update(variants=[]),
    "graphs in graphs": nest,
}


@pytest.fixture(scope="module")
def branches(tmp_path_factory):
    class Model(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    return opkit.export(Model(), (torch.ones(3),), path=tmp_path_factory.mktemp("saved") / "model.opk").read_bytes()


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("case", HOSTILE_GRAPHS)
def test_hostile_graphs(branches, tmp_path, case, loader):
    rewritten(branches, tmp_path / "model.opk", HOSTILE_GRAPHS[case])
    with pytest.raises(ModelFileError, match=r"model\.opk"):
        LOADERS[loader](tmp_path / "model.opk")


def test_files_that_are_none(tmp_path):
    (tmp_path / "text").write_text("no model")
    with pytest.raises(ModelFileError, match="is not a saved model"):
        opkit.load(tmp_path / "text")
    with pytest.raises(FileNotFoundError):
        opkit.load(tmp_path / "none")


def test_weights_are_safetensors(saved, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    path = tmp_path / "model.opk"
    path.write_bytes(saved[0])
    with zipfile.ZipFile(path) as opened:
        names = dict(safetensors.deserialize(opened.read(archive.WEIGHTS)))
    assert names


def test_a_file_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(archive.zipfile.ZipFile, "writestr", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        opkit.export(nn.Tanh(), (torch.ones(2),), path=tmp_path / "model.opk")
    assert not any(tmp_path.iterdir())
