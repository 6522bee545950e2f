"""The classes of bfloat16 and float16 that C kernels are compiled with: every value, and the rounding of floats."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import numpy as np
import pytest

from opkit.kernels.cc.source import INCLUDE

pytestmark = [pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"), pytest.mark.sweep(2)]

SOURCE = """
#include "opkit.h"
#include "opkit_types.h"
extern "C" void narrow(const float* x, T* out, int64_t n) { for (int64_t i = 0; i < n; i++) out[i] = x[i]; }
extern "C" void widen(const T* x, float* out, int64_t n) { for (int64_t i = 0; i < n; i++) out[i] = x[i]; }
extern "C" int32_t idioms(T* x) {
    static_assert(sizeof(T) == 2 && alignof(T) == 2, "");
    T sum = 0, old;
    float wide = x[0];
    sum += x[0];
    sum -= 1;
    sum *= x[1];
    sum /= 2.0;
    old = sum++;
    --sum;
    x[2] = sum;
    x[3] = -x[0] * x[1] + 1;
    x[4] = x[0] > x[1] ? x[0] : (T)0;
    x[7] = x[0] > 0 ? -x[0] : x[0];
    T zeros[4] = {0};
    x[5] = zeros[1];
    const T two = 2, array[2] = {1, x[0]};
    x[6] = two * array[1];
    if (!x[0] || x[0] == 0 || x[0] != wide || !(x[1] < x[0]) || old != sum) return 1;
    return (int32_t)x[0];
}
"""


@pytest.fixture(
    scope="module",
    params=[
        "opk_bf16 -O3 -fassociative-math -fno-signed-zeros -fno-trapping-math -ffinite-math-only",
        "opk_half -O3 -march=native",
        "opk_bf16 -O2",
        "opk_half -O0",
    ],
)
def library(request, tmp_path_factory):
    name, *flags = request.param.split()
    folder = tmp_path_factory.mktemp("types")
    (folder / "t.cpp").write_text(SOURCE)
    options = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-I{INCLUDE}", f"-DT={name}", *flags]
    subprocess.run(["g++", *options, str(folder / "t.cpp"), "-o", str(folder / "t.so")], check=True)
    return name, ctypes.CDLL(str(folder / "t.so"))


def run(function, x, out):
    function(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(out.ctypes.data), ctypes.c_int64(x.size))
    return out


def nearest(x, name):
    """What each float rounds to, as bits."""
    if name == "opk_half":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).view(np.uint16)
    bits = x.view(np.uint32).astype(np.uint64)
    low, even = bits & 0xFFFF, (bits >> 16) & 1
    up = (low > 0x8000) | ((low == 0x8000) & (even == 1))
    return ((bits >> 16) + up).astype(np.uint16)


def wide(bits, name):
    return (
        bits.view(np.float16).astype(np.float32)
        if name == "opk_half"
        else (bits.astype(np.uint32) << 16).view(np.float32)
    )


def test_every_value_becomes_the_same_float_and_comes_back(library):
    name, functions = library
    bits = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    expected = wide(bits, name)
    found = run(functions.widen, bits, np.empty(65536, np.float32))
    missing = np.isnan(expected)
    assert (np.isnan(found) == missing).all()
    assert (found.view(np.uint32) == expected.view(np.uint32))[~missing].all()
    back = run(functions.narrow, found, np.empty(65536, np.uint16))
    assert (back == bits)[~missing].all()
    assert np.isnan(wide(back, name))[missing].all()


def difficult_floats(name):
    """Each value, what lies halfway to the next, and the floats on both sides of those; subnormals, and any bits."""
    values = wide(np.arange(0x7C00 if name == "opk_half" else 0x7F80, dtype=np.uint32).astype(np.uint16), name)
    halfway = ((values[:-1].astype(np.float64) + values[1:]) / 2).astype(np.float32)
    chosen = np.concatenate([values, halfway, np.float32([65504, 65519.996, 65520, 65536, 1e30, np.inf, 3.4e38])])
    near = np.concatenate([chosen, np.nextafter(chosen, np.float32(np.inf)), np.nextafter(chosen, np.float32(0))])
    random = np.random.default_rng(0).integers(0, 2**32, 500_000, dtype=np.uint32).view(np.float32)
    return np.concatenate([near, -near, random[~np.isnan(random)]])


def test_floats_round_to_the_nearest_and_ties_to_even(library):
    name, functions = library
    x = difficult_floats(name)
    found = run(functions.narrow, x, np.empty(x.size, np.uint16))
    wrong = np.flatnonzero(found != nearest(x, name))
    assert wrong.size == 0, (x[wrong[:5]], found[wrong[:5]])


def test_every_kind_of_nan_stays_one(library):
    name, functions = library
    mantissas = np.concatenate([1 << np.arange(23), np.random.default_rng(1).integers(1, 2**23, 1000)])
    bits = (0x7F800000 | mantissas).astype(np.uint32)
    x = np.concatenate([bits, bits | 0x80000000]).astype(np.uint32).view(np.float32)
    found = run(functions.narrow, x, np.empty(x.size, np.uint16))
    assert np.isnan(wide(found, name)).all()
    assert ((found >> 15) == (x.view(np.uint32) >> 31)).all()


def test_what_c_does_with_a_number(library):
    name, functions = library
    x = nearest(np.float32([3, 2, 0, 0, 0, 9, 0, 0]), name)
    assert functions.idioms(ctypes.c_void_p(x.ctypes.data)) == 3
    assert wide(x, name).tolist() == [3, 2, 2, -5, 3, 0, 6, -3]
