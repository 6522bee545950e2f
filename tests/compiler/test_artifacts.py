"""torch.compiler.save_cache_artifacts and load_cache_artifacts carry what opkit compiled to a process with an empty cache."""

import hashlib
import os

import fresh_process
import pytest
import torch

import opkit.compiler  # noqa: F401  torch knows the artifacts from here on
from opkit.errors import BuildCacheWarning

PROGRAM = """
import sys, torch, opkit

path, what = sys.argv[1:]

C = "void twice(const T* x, T* out, int64_t x_numel) { for (int64_t i = 0; i < x_numel; i++) out[i] = x[i] * 2 + 1000; }"
unit, fused = [opkit.custom_op(f"artifacts::{each}", lambda x: x * 2, schema="(Tensor x) -> Tensor") for each in ("a", "b")]
unit.register_kernel("cpu", opkit.c_kernel(C))
fused.register_kernel("cpu", opkit.c_kernel(C, elementwise=True))
if what == "save":
    unit(torch.ones(3))  # before torch has looked up the backend
else:
    sys.addaudithook(lambda event, given: sys.exit(f"{given} is started") if event == "subprocess.Popen" else None)
if what == "load before":
    import opkit.compiler
    torch.compiler.load_cache_artifacts(open(path, "rb").read())
torch.manual_seed(0)
linear = torch.nn.Linear(4, 4)
model = torch.compile(lambda x: unit(fused(torch.nn.functional.gelu(linear(x)) + 1)), backend="opkit")
if what == "load after":
    torch.compiler.load_cache_artifacts(open(path, "rb").read())
loss = model(torch.ones(2, 4)).sum()
loss.backward()
if what == "save":
    open(path, "wb").write(torch.compiler.save_cache_artifacts()[0])
print(loss.item(), linear.bias.grad.tolist(), "opkit.compiler.pipeline" in sys.modules)
"""


def run(folder, what):
    environment = os.environ | {"OPKIT_CACHE_DIR": str(folder / what)}
    return fresh_process.run(["-c", PROGRAM, folder / "artifacts", what], environment).stdout.split("] ")


@pytest.mark.parametrize("load", ["load after", pytest.param("load before", marks=pytest.mark.exhaustive)])
def test_a_process_with_an_empty_cache_compiles_nothing(tmp_path, load):
    """It loads the artifacts before or after torch has looked up the backend."""
    saved = run(tmp_path, "save")
    assert run(tmp_path, load) == [saved[0], "False\n"]


DIGEST = "ab" * 32
PLAN = b'{"plan": [], "texts": []}'
SIGNED = hashlib.sha256(PLAN).hexdigest().encode() + b"\n" + PLAN


@pytest.mark.parametrize(
    ("place", "content", "reason"),
    [
        (f"graphs/ab/{DIGEST}.json", SIGNED[:-1] + b" ", "sha256 differs"),
        (f"graphs/ab/{DIGEST}.json", b"", "not enough values"),
        (f"graphs/ab/{DIGEST}", SIGNED, "no place of an entry"),
        (f"graphs/cd/{DIGEST}.json", SIGNED, "no place of an entry"),
        (f"graphs/../graphs/ab/{DIGEST}.json", SIGNED, "no place of an entry"),
        (f"/graphs/ab/{DIGEST}.json", SIGNED, "no place of an entry"),
        (f"native/ab/{DIGEST}", b"\x7fELF", "cannot be read as JSON"),
        (f"native/ab/{DIGEST}", b'{"key": "../x"}\n\x7fELF', "does not describe a built file"),
        (f"triton/ab/{DIGEST}", b'{"sha256": "", "launch": {}}\n\x7fELF', "sha256 differs"),
        (f"triton/named/ab/{DIGEST}", b"../../x", "not the key of a binary"),
    ],
    ids=range(10),
)
def test_a_damaged_or_hostile_artifact_is_left_out(tmp_path, settings, place, content, reason):
    from torch.compiler._cache import CacheArtifactManager

    settings(cache_dir=tmp_path)
    with CacheArtifactManager.with_fresh_cache():
        CacheArtifactManager.record_artifact("opkit", place, content)
        CacheArtifactManager.record_artifact("opkit", f"graphs/ab/{DIGEST}.json", SIGNED)
        data, _ = torch.compiler.save_cache_artifacts()
    with pytest.warns(BuildCacheWarning, match=rf"(?s)left out: .*{reason}"):
        torch.compiler.load_cache_artifacts(data)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / f"graphs/ab/{DIGEST}.json"]
    assert (tmp_path / f"graphs/ab/{DIGEST}.json").read_bytes() == SIGNED
