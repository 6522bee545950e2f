"""A kernel in C beside the same kernel in the interpreter."""

import ctypes

import numpy as np
import pytest

from opkit.compiler.emit.c.source import source
from opkit.compiler.ir.kernel import KernelLaunch
from opkit.compiler.ir.verifier import verify_kernel
from tests.compiler import native
from tests.compiler.interpreter_kernel import run_kernel

PARALLEL = ctypes.CFUNCTYPE(
    None, ctypes.CFUNCTYPE(None, ctypes.c_void_p), ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
)
NOTHING = np.zeros(1)
THREAD = ctypes.CFUNCTYPE(ctypes.c_int)


class Runtime(ctypes.Structure):
    _fields_ = (("parallel", PARALLEL), ("thread", THREAD), ("threads", ctypes.c_int64), ("error", ctypes.c_int64 * 3))


class Team:
    """Threads one after the other: what is shared among them, each part in turn, is seen without any."""

    def __init__(self, threads, present=None):
        self.now, self.parts = 0, []
        self.present = threads if present is None else present
        self.runtime = Runtime(PARALLEL(self.parallel), THREAD(lambda: self.now), threads)

    def parallel(self, work, data, threads, flags):
        self.parts.append(threads)
        for thread in range(min(threads, self.present)):
            self.now = thread
            work(data)


def library(launches, buffers, sizes=()):
    (text,) = source(launches, buffers, sizes)
    return native.library(text)


def call(segment, arrays, sizes=(), runtime=None):
    runtime = runtime or Runtime(threads=1)
    pointers = (ctypes.c_void_p * max(1, len(arrays)))(*(a.ctypes.data for a in arrays))
    numbers = (ctypes.c_int64 * max(1, len(sizes)))(*sizes)
    segment.restype = ctypes.c_int64
    return segment(pointers, numbers, ctypes.byref(runtime)), list(runtime.error)


def in_c(kernel, arrays, sizes, runtime=None):
    """Run the kernel on the arrays; what the segment returned."""
    names = [a.buffer for a in kernel.arguments]
    made = library([[KernelLaunch(kernel, tuple(names), tuple(kernel.sizes))]], names, kernel.sizes)
    return call(made.opkit_segment_0, [arrays[n] for n in names], [sizes[n] for n in kernel.sizes], runtime)


@pytest.fixture(scope="session")
def same():
    """The kernel's results in C, which are the interpreter's, to within ``ulps`` of the type of each array."""

    def check(kernel, arrays, sizes=None, ulps=0, runtime=None):
        return as_interpreted(in_c, kernel, arrays, sizes or {}, ulps, runtime)

    return check


@pytest.fixture
def all_same(subtests):
    """``same``, of many kernels without sizes that are compiled at once: ``(kernel, arrays, ulps)`` of each."""

    def check(cases):
        names = list(dict.fromkeys(a.buffer for kernel, *_ in cases for a in kernel.arguments))
        made = library([[KernelLaunch(k, tuple(a.buffer for a in k.arguments))] for k, *_ in cases], names)

        for number, (kernel, arrays, ulps) in enumerate(cases):
            segment = getattr(made, f"opkit_segment_{number}")

            def run(kernel, arrays, sizes, runtime, segment=segment):
                return call(segment, [arrays.get(name, NOTHING) for name in names], (), runtime)

            with subtests.test(kernel.name):
                as_interpreted(run, kernel, arrays, {}, ulps)

    return check


def as_interpreted(run, kernel, arrays, sizes, ulps, runtime=None):
    verify_kernel(kernel)
    expected = {name: array.copy() for name, array in arrays.items()}
    found = {name: array.copy() for name, array in arrays.items()}
    run_kernel(kernel, expected, sizes)
    assert run(kernel, found, sizes, runtime) == (0, [0, 0, 0])
    for argument in kernel.arguments:
        compare(found[argument.buffer], expected[argument.buffer], argument.dtype, ulps)
    return found


@pytest.fixture(scope="session")
def run():
    """What the segment returned, and the error that it noted."""
    return in_c


@pytest.fixture(scope="session")
def segments():
    """A library for launches; ``call(segment, arrays, sizes)`` runs one of its segments."""
    return library, call


@pytest.fixture(scope="session")
def team():
    return Team


def compare(found, expected, dtype, ulps):
    if dtype == "bf16":
        found, expected = ((a.astype(np.uint32) << 16).view(np.float32) for a in (found, expected))
    if ulps == 0 or found.dtype.kind != "f":
        np.testing.assert_array_equal(found, expected)
        return
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
    np.testing.assert_array_equal(found[~np.isfinite(found)], expected[~np.isfinite(expected)])
    finite = np.isfinite(found)
    step = 2.0**-7 if dtype == "bf16" else np.finfo(found.dtype).eps
    np.testing.assert_allclose(found[finite], expected[finite], rtol=ulps * step, atol=ulps * step * 1e-3)
