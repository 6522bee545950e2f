"""Launches on CPU tensors as if these lay on an H200: what is launched with what. The driver is a fake."""

import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from fake_gpu import imported

from opkit import config
from opkit.kernels.triton import binaries, compiling
from opkit.op.triton import variants

_fixtures = imported("opkit_fake_driver_of_hopper", Path(__file__).parents[2] / "kernels" / "conftest.py")
fake_libraries, fake = _fixtures.fake_libraries, _fixtures.fake
SHORT = {
    "hopper_backward": "m", "hopper_backward_begin": "b", "hopper_backward_end": "e", "decode": "d",
    "merge": "j",
}  # fmt: skip
"""Letters of kernels; others have the first of their names."""


def described(kind):
    block = [int(size) for size in re.match(r"tensordesc<[^\[]*\[([^\]]*)\]", kind)[1].split(",")]
    return {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": block, "fp4_padded": False}


class Gpu:
    """What was compiled and launched on CPU tensors as if these lay on an H200."""

    def __init__(self, fake):
        self.fake, self.requests, self.params = fake, [], {}

    def build(self, request):
        kinds = {name: kind for name, kind in request.signature.items() if kind.startswith("tensordesc")}
        metas = [described(kind) for kind in kinds.values()]
        params = binaries.params(request.signature, metas, request.offsets)
        name = f"{SHORT.get(request.function.name, request.function.name)}{len(self.requests)}"
        self.requests.append(request)
        self.params[name] = params
        sizes = " ".join(str(param.size) for param in params)
        return compiling.Binary(
            b"image", "cubin", f"{name} {sizes}", 128, 0, (1, 1, 1), False, False, 0, 1, 0, 1, params,
            binaries.maps(list(kinds), metas), request.target,
        )  # fmt: skip

    def launched(self):
        """Since it was asked last: a kernel's letter, and the addresses of its tensors by name, those of descriptors too."""
        rows, found = self.fake.launches, []
        for row in rows:
            name, *_ = row[1].split(" ")
            words = zip(self.params[name], row[-1].split(" "), strict=True)
            there = {
                p.name.removesuffix("_desc"): bytes.fromhex(word)[:8] for p, word in words if p.kind in ("ptr", "map")
            }
            found.append((name[0], {key: int.from_bytes(word, "little") for key, word in there.items()}))
        self.fake.library.fake_reset()
        return found


def found_at(given, names):
    """The addresses of the tensors of a call by name, of those that are there."""
    named = zip(names, given, strict=False)
    return {name: x.data_ptr() for name, x in named if isinstance(x, torch.Tensor)}


@pytest.fixture
def fake_h200(fake, monkeypatch, tmp_path):
    made = Gpu(fake)
    here = variants.Machine("cpu", lambda: fake.driver, lambda _: "sm_90", lambda _: "H200", lambda _: 232448)
    monkeypatch.setitem(variants.MACHINES, "cpu", here)
    monkeypatch.setattr(compiling, "build", made.build)
    monkeypatch.setattr(config, "get", lambda: config.Settings(cache_dir=tmp_path, bridge=False))
    return made
