"""gcc makes vectors of the loops that models spend their time in."""

import dataclasses
import re
import shutil
import subprocess

import pytest

from opkit.compiler.emit.c.expressions import SPELLED
from opkit.compiler.emit.c.source import source
from opkit.compiler.ir.expr import cast, const, load, op, var, where
from opkit.compiler.ir.index import Axis, axis, index, size
from opkit.compiler.ir.kernel import Accumulator, Kernel, KernelArgument, KernelLaunch, Loop, Store, Update
from opkit.compiler.ir.ops import OPS
from opkit.compiler.run.library import flags
from opkit.kernels.cc import isa

AT, N = axis(0, size("n")), size("n")
X, H, M = load("x", "f32", AT), load("h", "bf16", AT), load("m", "b1", AT)
ONE = const(1.0, "f32")
GIVEN = (("x", "f32"), ("h", "bf16"), ("m", "b1"), ("i", "i64"))


def kernel(body, before=(), after=()):
    written = (KernelArgument("y", "f32", True), KernelArgument("z", "bf16", True))
    given = (*(KernelArgument(name, dtype, False) for name, dtype in GIVEN), *written)
    return Kernel("k", given, ("n",), (*before, Loop(Axis(0, N), (body,), "vector"), *after))


def reduction(name, body):
    result = Store("y", index(0), cast(var("r", body.dtype), "f32"))
    return kernel(Update("r", name, body), (Accumulator("r", body.dtype, name),), (result,))


CASES = {
    "pointwise": kernel(Store("y", AT, op("add", op("mul", X, X), ONE))),
    "bf16": kernel(Store("z", AT, cast(op("exp", op("neg", cast(H, "f32"))), "bf16"))),
    "choice": kernel(Store("y", AT, where(M, op("exp", X), const(0.0, "f32")))),
    "masked": kernel(Store("y", AT, load("x", "f32", AT, mask=M))),
    "greatest": kernel(Store("y", AT, op("max", X, ONE))),
    "gelu": kernel(Store("y", AT, op("mul", X, op("add", op("erf", X), ONE)))),
    "broadcast": kernel(Store("y", AT, op("mul", X, load("x", "f32", index(0))))),
    **{name: reduction(name, X) for name in ("sum", "prod", "max", "min")},
    "any": reduction("any", op("lt", X, ONE)),
    "all": reduction("all", M),
    "sum of i64": reduction("sum", load("i", "i64", AT)),
    "sum of bf16": reduction("sum", cast(H, "f32")),
    "sum of squares": reduction("sum", op("mul", X, X)),
}


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
@pytest.mark.skipif(isa.machine() != "x86_64", reason="what is vectorised is known for x86-64")
def test_vectors(tmp_path):
    names = [a.buffer for a in CASES["pointwise"].arguments]
    launches = [
        [KernelLaunch(dataclasses.replace(made, name=name.replace(" ", "_")), tuple(names), ("n",))]
        for name, made in CASES.items()
    ]
    written = source(launches, names, ["n"])[0]
    (tmp_path / "k.c").write_text(written)
    command = ["gcc", "-std=gnu11", "-march=x86-64-v3", *flags(), "-fopt-info-vec", "-c", "k.c", "-o", "k.o"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stderr
    vectors = {int(line) for line in re.findall(r"k\.c:(\d+):\d+: optimized: loop vectorized using", said)}
    within, done = None, set()
    for number, line in enumerate(written.splitlines(), 1):
        if begins := re.search(r"\bvoid k_(\w+)\(const float", line):
            within = begins[1].replace("_", " ")
        if number in vectors:
            done.add(within)
    assert set(CASES) <= done, said


def test_every_op_is_written():
    """An op without a spelling would be called by a name that C's library may not have."""
    library = {
        "pow",
        "exp",
        "expm1",
        "log",
        "log1p",
        "sin",
        "cos",
        "exp2",
        "log2",
        "log10",
        "tan",
        "asin",
        "acos",
        "atan",
        "atan2",
        "sinh",
        "cosh",
        "tanh",
        "asinh",
        "acosh",
        "atanh",
        "erf",
        "erfc",
    }
    scalars = {row.name for row in OPS.values() if row.kind == "scalar" and row.numpy is not None}
    assert scalars == (set(SPELLED) - {"where"}) | library
