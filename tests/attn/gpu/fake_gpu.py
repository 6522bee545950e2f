"""A GPU that there is not, on which attention's tiles are searched for: a fake driver, a compiler of nothing, a fake clock."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from opkit import config
from opkit.attn.calls import AttentionCall, GradientCall
from opkit.attn.gpu import blocks
from opkit.attn.gpu.decode import launches as decoding
from opkit.attn.gpu.portable import backward, forward
from opkit.attn.masks.program import BAND
from opkit.kernels.triton import binaries, compiling
from opkit.kernels.tuning import tuning
from opkit.op.triton import variants
from opkit.op.triton.launcher_table import Launching

TESTS = Path(__file__).parents[2]


def imported(name, file):
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FAR = 2**62
CAUSAL = [BAND, -FAR, 0]
KERNELS = (blocks.FORWARD_KERNEL, blocks.KEYS_KERNEL, blocks.QUERIES_KERNEL, blocks.BIAS_KERNEL)


def tiles(request):
    """Rows, keys, warps and stages of what was compiled."""
    constants, options = request.constexprs, request.options
    return constants["ROWS"], constants["KEYS"], options["num_warps"], options["num_stages"]


def milliseconds(size):
    """What the clock shows for tiles: the least for 32 keys, then for few rows, few warps and few stages."""
    rows, keys, warps, stages = size
    return abs(keys - 32) + rows / 1000 + warps / 10000 + stages / 100000


_CACHES = (
    forward.forward_kernel,
    backward.keys_kernel,
    backward.queries_kernel,
    backward.delta_kernel,
    backward.bias_kernel,
)
_CACHES += (decoding._kernel, decoding._merging)


class _Timed:
    """A call as a launcher shows it, whose launches are timed by the fake clock."""

    def __init__(self, call, gpu):
        self._call, self._gpu = call, gpu

    def __getattr__(self, name):
        return getattr(self._call, name)

    def time(self, entry, written=()):
        request = self._gpu.compiled[-1]
        self._gpu.timed.append(request)
        return self._gpu.clock(request)


class Gpu:
    """The CPU as a GPU of some kind; ``timed`` and ``launched`` have requests to the compiler, by kernels' names."""

    def __init__(self, fake, monkeypatch, cache):
        self.fake, self.patch, self.cache = fake, monkeypatch, cache
        self.timed, self.compiled, self.clock = [], [], lambda request: milliseconds(tiles(request))
        self.refuse = lambda request: None
        self.become("NVIDIA A100-SXM4-80GB", "sm_80", 166912)
        monkeypatch.setattr(compiling, "build", self.build)
        miss = Launching.miss
        monkeypatch.setattr(Launching, "miss", lambda launching, call: miss(launching, _Timed(call, self)))
        self.settings()

    def settings(self, **values):
        chosen = config.Settings(**{"cache_dir": self.cache, "bridge": False, **values})
        self.patch.setattr(config, "get", lambda: chosen)
        self.restart()

    def restart(self):
        """What this process knows is forgotten, as in a new one."""
        tuning.forget()
        self.timed.clear()
        for each in _CACHES:
            each.cache_clear()

    def become(self, model, target, shared):
        here = variants.Machine("cpu", lambda: self.fake.driver, lambda _: target, lambda _: model, lambda _: shared)
        self.patch.setitem(variants.MACHINES, "cpu", here)

    def build(self, request):
        self.refuse(request)
        self.compiled.append(request)
        params = binaries.params(request.signature, (), request.offsets)
        name = " ".join([f"k{len(self.compiled) - 1}", *(str(param.size) for param in params)])
        return compiling.Binary(
            b"image\0", "cubin", name, 128, 0, (1, 1, 1), False, False, 0, 1, 0, 1, params, (), request.target
        )

    def launches(self, kernel):
        """What was launched of a kernel, in order."""
        numbers = [int(row[1].split(" ")[0][1:]) for row in self.fake.launches]
        return [self.compiled[n] for n in numbers if self.compiled[n].function.__name__ == kernel]


_driver = imported("opkit_fake_driver_of_attention", TESTS / "kernels" / "conftest.py")
fake_libraries, fake = _driver.fake_libraries, _driver.fake


@pytest.fixture
def gpu(fake, monkeypatch, tmp_path):
    """An A100 that there is not, with no results of searches."""
    made = Gpu(fake, monkeypatch, tmp_path)
    yield made
    made.restart()


def call(batch=1, heads=2, queries=600, d=64, keys=None, dtype=torch.bfloat16, mask=(), masks=(), biases=(), bias=()):
    q, k = (torch.zeros(batch, heads, n, d, dtype=dtype) for n in (queries, keys or queries))
    return AttentionCall(q, k, k, list(masks), list(biases), None, None, list(mask), list(bias), 0.1, 0.0, 0.0, False)


def tried(kernel, d=64, e=None, size=2, shared=166912, pair=0):
    return [tuple(each) for each in blocks.candidates(kernel, d, e or d, size, shared, pair)]


LABEL = "ROWS={}, KEYS={}, num_warps={}, num_stages={}"
FASTEST = min(tried(blocks.FORWARD_KERNEL), key=milliseconds)


def timed(gpu):
    return [tiles(request) for request in gpu.timed]


def launched(gpu, kernel="attention_forward"):
    return tiles(gpu.launches(kernel)[-1])


def gradient_call(given):
    lse = torch.zeros(given.q.shape[:3])
    rest = given.mask_tensors, given.bias_tensors, given.mask, given.bias, 0.1, 0.0
    return GradientCall(given.q, None, given.q, given.k, given.v, given.q, lse, *rest, False)
