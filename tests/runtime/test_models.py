"""Saved models run without torch, and give what their modules give."""

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

import opkit
import opkit.runtime
from opkit.errors import ArgumentError, ModelFileError
from opkit.masks import Causal, SlidingWindow

Dim = torch.export.Dim


def reloaded(model, args=(), *, path, **options):
    opkit.export(model, args, path=path / "model.opk", **options)
    return opkit.runtime.load(path / "model.opk")


def assert_close(found, expected, **tolerance):
    torch.testing.assert_close(torch.from_dlpack(found), expected.detach(), **tolerance)


class Block(nn.Module):
    def __init__(self, width=32, heads=2):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        x = self.first(x + self.out(attended.transpose(1, 2).flatten(2)))
        return self.second(x + self.down(F.gelu(self.up(x))))


class SmallBert(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(50, 32), nn.Embedding(24, 32)
        self.norm, self.blocks, self.head = nn.LayerNorm(32), nn.ModuleList([Block(), Block()]), nn.Linear(32, 3)

    def forward(self, words, mask):
        x = self.norm(self.words(words) + self.places(torch.arange(words.shape[1])))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(torch.tanh(x[:, 0]))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.depthwise, self.point = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 1)
        self.dilated, self.head = nn.Conv2d(8, 12, 3, padding=2, dilation=2, groups=2), nn.Linear(12, 5)
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        x = F.relu(x + self.point(F.relu(self.depthwise(x))))
        return self.head(F.adaptive_avg_pool2d(self.dilated(x), 1).flatten(1))


def test_a_perceptron_of_any_batch(tmp_path):
    model = nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.LayerNorm(33), nn.Linear(33, 3)).eval()
    loaded = reloaded(model, (torch.randn(3, 16),), path=tmp_path, dynamic_shapes=({0: Dim("batch", max=64)},))
    for x in (torch.randn(5, 16), torch.randn(1, 16), torch.randn(16, 7).t(), torch.randn(64, 16)):
        assert_close(loaded(x.numpy()), model(x))
        assert_close(loaded(x), model(x))


def test_a_transformer_of_any_length(tmp_path):
    batch, length = Dim("batch", max=8), Dim("length", max=24)
    words, mask = torch.randint(50, (2, 9)), torch.ones(2, 9, dtype=torch.bool)
    model, shapes = SmallBert().eval(), ({0: batch, 1: length},) * 2
    loaded = reloaded(model, (words, mask), path=tmp_path, dynamic_shapes=shapes)
    for sizes in ((2, 9), (3, 24), (8, 2)):
        words, mask = torch.randint(50, sizes), torch.rand(sizes) > 0.3
        mask[:, 0] = True
        assert_close(loaded(words.numpy(), mask.numpy()), model(words, mask), atol=1e-5, rtol=1e-5)
    with pytest.raises(RuntimeError, match=r"index 99 is out of range for a dimension of size 50 .*embedding"):
        loaded(np.full((2, 9), 99), np.ones((2, 9), bool))


@pytest.mark.parametrize("freeze", [True, False])
def test_a_convolutional_network(tmp_path, freeze):
    model, x = Convolutions().eval(), torch.randn(2, 3, 17, 23)
    loaded = reloaded(model, (x,), path=tmp_path, freeze=freeze, dynamic_shapes=({0: Dim("batch", max=8)},))
    for batch in (2, 5):
        x = torch.randn(batch, 3, 17, 23)
        assert_close(loaded(x.numpy()), model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [(23, 26), (15, 14)])
def test_convolutions_by_winograd(tmp_path, size):
    model = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 3)).eval()
    x = torch.randn(3, 16, *size)
    loaded = reloaded(model, (x,), path=tmp_path, dynamic_shapes=({0: Dim("batch", max=8)},))
    x[1, 2, 3, 4] = torch.nan
    assert_close(loaded(x.numpy()), model(x), atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(tmp_path, dtype):
    class Model(nn.Module):
        def forward(self, q, k, v, bias):
            banded = opkit.attention(q, k, v, mask=Causal() & SlidingWindow(3), softcap=5.0)
            return banded + F.scaled_dot_product_attention(q, k, v, bias), opkit.attention(q, k, v, bias=bias)

    q, k, v = torch.randn(3, 2, 4, 7, 16).to(dtype)
    bias = torch.randn(4, 7, 7).to(dtype)
    loaded = reloaded(Model(), (q, k, v, bias), path=tmp_path)
    for found, expected in zip(loaded(q, k, v, bias), Model()(q, k, v, bias), strict=True):
        assert_close(found, expected, **({} if dtype == torch.float32 else {"atol": 0.03, "rtol": 0.03}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_of_attention(tmp_path, dtype):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("ids", torch.arange(80) // 30)
            self.register_buffer("table", torch.randn(4, 160))

        def forward(self, q, k, v):
            step, slope = 3, 0.25

            def mask(b, h, i, j):
                return (self.ids[i] == self.ids[j]) & ((i >= j) | ((i - j) % step == h % 2))

            def score(s, b, h, i, j):
                return s * (1 + slope * torch.sigmoid(s)) + self.table[h, i - j + 80] + (self.ids[j] * i).float() * 0.01

            first = opkit.attention(q, k, v, mask=mask, bias=score)
            return first, opkit.attention(q, k, v, mask=lambda b, h, i, j: (i * j) % step != 1)

    q, k, v = torch.randn(3, 2, 4, 70, 16).to(dtype)
    model = Model()
    loaded = reloaded(model, (q, k, v), path=tmp_path)
    for found, expected in zip(loaded(q, k, v), model(q, k, v), strict=True):
        assert_close(
            found,
            expected,
            **({"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.05}),
        )


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x, out):
        self.calls += 1
        out.mul_(2)
        return {"sum": x.sum(0) + self.calls, "same": (x, None)}


def test_state_and_arguments_that_are_written(tmp_path):
    x = torch.ones(2, 3)
    programs = {name: torch.export.export(model, (x, torch.ones(2))) for name, model in _twice(Counter()).items()}
    opkit.export(programs, path=tmp_path / "model.opk")
    loaded = opkit.runtime.load(tmp_path / "model.opk")
    for calls, entry in enumerate(("one", "same", "one"), 1):
        out = np.ones(2, np.float32)
        found = loaded.entries[entry](x.numpy(), out)
        assert np.asarray(found["sum"]).tolist() == [2 + calls] * 3
        assert out.tolist() == [2, 2]
        assert (np.asarray(found["same"][0]).tolist(), found["same"][1]) == (x.tolist(), None)
    with pytest.raises(ArgumentError, match="out, which the model writes to, has other strides"):
        loaded.entries["one"](x.numpy(), np.ones(4, np.float32)[::2])
    with pytest.raises(ArgumentError, match="'one', 'same'"):
        loaded(x.numpy())


def _twice(model):
    return {"one": model, "same": model}


@pytest.mark.parametrize("storage", ["int8", "bfloat16", "float8_e4m3fn"])
def test_narrow_storage(tmp_path, storage):
    model, x = (
        nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 8)).eval(),
        torch.randn(3, 64),
    )  # by threads
    found = reloaded(model, (x,), path=tmp_path, storage=storage)(x.numpy())
    assert_close(found, opkit.load(tmp_path / "model.opk")(x))


def test_operators_with_kernels_in_the_file(tmp_path):
    @opkit.custom_op("runtime::scaled")
    def scaled(x: Float[Tensor, "rows columns"], scale: float) -> Float[Tensor, "rows columns"]:
        return x * scale

    @opkit.custom_op("runtime::cube")
    def cube(x: Tensor) -> Tensor:
        return x**3

    loop = "for (int64_t i = 0; i < out_numel; i++) out[i] ="
    source = f"void scaled(const T* x, double scale, T* out, int64_t out_numel) {{ {loop} x[i] * scale; }}"
    scaled.register_kernel("cpu", opkit.c_kernel(source))
    source = f"void cube(const T* x, T* out, int64_t out_numel) {{ {loop} x[i] * x[i] * x[i]; }}"
    cube.register_kernel("cpu", opkit.c_kernel(source, elementwise=True))

    class Model(nn.Module):
        def forward(self, x):
            return scaled(cube(x + 1), 3.0) * 2

    x = torch.randn(5, 4)
    loaded = reloaded(Model(), (x,), path=tmp_path, dynamic_shapes=({0: Dim("rows")},))
    assert_close(loaded(x[:3].numpy()), 6 * (x[:3] + 1) ** 3)


def test_operators_with_every_kind_of_argument(tmp_path):
    @opkit.custom_op("runtime::every", mutates_args=())
    def every(
        x: Tensor,
        others: Sequence[Tensor],
        flags: Sequence[bool],
        counts: Sequence[int],
        weights: Sequence[float],
        mode: str = "abc",
        n: int = 4,
        on: bool = True,
        bias: Tensor | None = None,
        eps: float = 0.5,
    ) -> Tensor:
        y = x + 3 * sum(flags) + sum(counts) + sum(weights) + len(mode) + n + 7 * on + eps
        return sum(others, y if bias is None else y + bias)

    source = """
        void every(const T* x, const T* const* others, int64_t others_len, const uint8_t* flags, int64_t flags_len,
                   const int64_t* counts, int64_t counts_len, const double* weights, int64_t weights_len, const char* mode,
                   int64_t n, bool on, const T* bias, double eps, T* out, int64_t x_numel) {
            double sum = strlen(mode) + n + 7 * on + eps;
            for (int64_t i = 0; i < flags_len; i++) sum += 3 * flags[i];
            for (int64_t i = 0; i < counts_len; i++) sum += counts[i];
            for (int64_t i = 0; i < weights_len; i++) sum += weights[i];
            for (int64_t i = 0; i < x_numel; i++) {
                out[i] = x[i] + sum + (bias ? bias[i] : 0);
                for (int64_t j = 0; j < others_len; j++) out[i] += others[j][i];
            }
        }"""
    every.register_kernel("cpu", opkit.c_kernel(source))

    class Model(nn.Module):
        def forward(self, x):
            first = every(
                x, [x, x * 2], [True, False, True], [1, x.shape[0]], [0.25, 2]
            )  # the others have their defaults
            return first, every(x + 1, [], [], [], [], "", 1, False, x, eps=0)

    x = torch.randn(5, 4)
    loaded = reloaded(Model(), (x,), path=tmp_path, dynamic_shapes=({0: Dim("rows")},))
    for found, expected in zip(loaded(x[:3].numpy()), Model()(x[:3]), strict=True):
        assert_close(found, expected)


def test_what_the_runtime_refuses(tmp_path):
    class Sorted(nn.Module):
        def forward(self, x):
            return x.sort().values

    with pytest.raises(ModelFileError, match=r"model\.opk.*operators that only torch has: aten::sort\.default"):
        reloaded(Sorted(), (torch.ones(3),), path=tmp_path)
    with pytest.raises(ModelFileError, match=r"none.*cannot be opened"):
        opkit.runtime.load(tmp_path / "none")
    loaded = reloaded(nn.Tanh(), (torch.ones(2, 3),), path=tmp_path)
    x = np.ones((2, 3), np.float32)
    for args, message in [
        ((x[:1],), r"float32\[1, 3\], and the model takes float32\[2, 3\]"),
        ((x.astype(np.float64),), r"float64\[2, 3\]"),
        ((x.tolist(),), "is a list"),
        ((x, x), "2 values"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            loaded(*args)


def test_results_share_memory_and_outlive_the_model(tmp_path):
    x = np.ones((2, 3), np.float32)
    found = reloaded(nn.Tanh(), (torch.ones(2, 3),), path=tmp_path).entries[""](x)
    one, other = np.from_dlpack(found), torch.from_dlpack(found)
    assert (found.shape, found.strides, found.dtype, found.size, len(found)) == ((2, 3), (3, 1), "float32", 6, 2)
    assert one.__array_interface__["data"][0] == other.data_ptr()
    del found
    np.testing.assert_allclose(one, np.tanh(x), rtol=1e-6)


def test_calls_in_several_threads(tmp_path):
    model, x = Block().eval(), torch.randn(4, 6, 32)
    mask = torch.ones(4, 6, dtype=torch.bool)
    loaded, expected = reloaded(model, (x, mask), path=tmp_path), model(x, mask)
    found = [None] * 4

    def call(n):
        for _ in range(10):
            found[n] = loaded(x, mask)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in found:
        assert_close(each, expected, atol=1e-5, rtol=1e-5)


def test_a_process_without_torch(tmp_path):
    model, x = SmallBert().eval(), torch.randint(50, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.bool)
    opkit.export(model, (x, mask), path=tmp_path / "model.opk")
    np.savez(tmp_path / "call.npz", x=x, mask=mask, expected=model(x, mask).detach())
    (tmp_path / "wheel" / "opkit").mkdir(parents=True)  # with what the wheel opkit-runtime has, and NumPy
    for name in ("errors.py", "runtime"):
        (tmp_path / "wheel" / "opkit" / name).symlink_to(Path(opkit.__file__).with_name(name))
    for package in Path(np.__file__).parents[1].glob("numpy*"):
        (tmp_path / "wheel" / package.name).symlink_to(package)
    script = f"""
        import os, sys, numpy
        import opkit.runtime
        opkit.runtime.set_threads(2)
        call = numpy.load({str(tmp_path / "call.npz")!r})
        loaded = opkit.runtime.load({str(tmp_path / "model.opk")!r})
        def check():
            numpy.testing.assert_allclose(loaded(call["x"], call["mask"]), call["expected"], atol=1e-5)
        check()
        child = os.fork()
        if child == 0:  # which does not have its parent's threads
            check()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(sorted(name for name in sys.modules if name.partition(".")[0] in ("opkit", "torch")))
    """
    command = [sys.executable, "-P", "-S", "-c", textwrap.dedent(script)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "wheel")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    modules = ("arrays", "kernels", "library", "models", "structure")
    expected = ["opkit", "opkit.errors", "opkit.runtime", *(f"opkit.runtime.{name}" for name in modules)]
    assert done.stdout == f"{expected}\n", done.stderr
