"""Random calls: what is compiled and passed for each is what Triton's own native code makes of the same arguments."""

import ctypes
import math
import random

import pytest
import torch
import triton
import triton.language as tl
from jaxtyping import Shaped
from torch import Tensor

import opkit

_DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.float8_e5m2, torch.uint8)
_INTS = (0, 1, 2, 15, 16, 17, 32, -1, -16, 2**31 - 1, 2**31, 2**40, 2**40 + 1, -(2**31), -(2**31) - 1, -(2**40))
_FLOATS = (0.0, -0.0, 1.0, 1e-300, 0.5, 3.0e38, math.inf, -math.inf)


@triton.jit(do_not_specialize=["k"], do_not_specialize_on_alignment=["m", "y"])
def _everything(
    x, y, out, n, m, k, s, wide: tl.int64, double: tl.float64, flag, x_stride_0, d, x_numel, twice, half,
    MODE: tl.constexpr, TEXT: tl.constexpr, C: tl.constexpr, HAS: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    pass


def everything(
    x: Shaped[Tensor, "r d"], y: Tensor | None, n: int, m: int | None, k: int, s: float, wide: int, double: float,
    flag: bool, text: str, c: float | None, numbers: list[int], maybe: bool | None = None,
) -> Tensor:  # fmt: skip
    return torch.empty_like(x, dtype=torch.float32)


def _twice(n):
    return 2 * n if abs(n) < 2**30 else n


def tensor(dtype, choose):
    """Rows with or without gaps, at an address that 16 bytes divide or not."""
    (rows, columns), offset, gap = (
        choose([(2, 3), (4, 16), (1, 1), (16, 1), (1, 16)]),
        choose([0, 0, 1, 16]),
        choose([0, 0, 3, 16]),
    )
    room = torch.zeros(512, dtype=torch.uint8 if dtype.itemsize == 1 else dtype).view(dtype)
    return room[offset : offset + rows * (columns + gap)].view(rows, columns + gap)[:, :columns]


def arguments(choose):
    return {
        "x": tensor(choose(_DTYPES), choose),
        "y": choose([None, tensor(torch.float32, choose), tensor(torch.float16, choose)]),
        **{name: choose(_INTS) for name in ("n", "k", "wide")},
        "m": choose([None, *_INTS]),
        **{name: choose(_FLOATS) for name in ("s", "double")},
        "flag": choose([True, False]),
        "text": choose(["", "a", "abcdefgh", "abcdefghi", "1"]),
        "c": choose([None, *_FLOATS]),
        "numbers": choose([[], [1], [1, 2], [2, 1], [0]]),
        "maybe": choose([None, True, False]),
    }


def given_to_triton(a):
    """The run-time parameters as an author would pass them to a launch of Triton's own."""
    x, y = a["x"], a["y"]
    derived = {"x_stride_0": x.stride(0), "d": x.shape[1], "x_numel": x.numel(), "half": a["s"] / 2}
    plain = {name: a[name] for name in ("n", "m", "k", "s", "flag")}
    return {"x": x, "y": y if y is None else y.contiguous(), **plain, **derived, "twice": _twice(a["n"])}


def check(launch, a, specialised):
    for name, value in given_to_triton(a).items():
        kind, key = specialised(value, False, name != "k", name not in ("k", "m", "y"))
        assert launch.request.signature[name] == kind, name
        assert (name in launch.request.divisible) == (key == "D"), name
        if kind == "constexpr":
            assert launch.request.constexprs[name] is value or launch.request.constexprs[name] == value
        elif isinstance(value, float):
            assert launch.values[name] == ctypes.c_float(value).value
        elif not isinstance(value, Tensor):
            assert launch.values[name] == value, name
    assert launch.values["x"] == a["x"].data_ptr()
    assert (launch.values["wide"], repr(launch.values["double"])) == (a["wide"], repr(a["double"]))
    expected = [(a["maybe"], a["flag"]), a["text"], a["c"], a["y"] is not None, tuple(a["numbers"])]
    assert repr([launch.request.constexprs[name] for name in ("MODE", "TEXT", "C", "HAS", "LIST")]) == repr(expected)


@pytest.mark.parametrize(
    ("seed", "count"), [(1, 30), *[pytest.param(seed, 100, marks=pytest.mark.exhaustive) for seed in (1, 2)]]
)
def test_random_calls(on_cpu, op, seed, count):
    native = pytest.importorskip("triton._C.libtriton").native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    made, choose = op(everything), random.Random(seed).choice
    made.register_kernel(
        "cpu",
        opkit.triton_kernel(
            _everything, grid=lambda n: max(1, min(n, 100)), twice=_twice, half=lambda s: s / 2,
            MODE=lambda maybe, flag: (maybe, flag), TEXT=lambda text: text, C=lambda c: c, HAS=lambda y: y is not None,
            LIST=lambda numbers: numbers,
        ),
    )  # fmt: skip
    for _ in range(count):
        a = arguments(choose)
        on_cpu.fake.library.fake_reset()
        out = made(**a)
        (launch,) = on_cpu.launches
        assert launch.grid == (max(1, min(a["n"], 100)), 1, 1)
        assert launch.values["out"] == out.data_ptr()
        check(launch, a, lambda *value: native(CUDABackend, *value))
