"""Each form as text."""

from opkit.compiler.ir.expr import const, load, op, var
from opkit.compiler.ir.index import Axis, axis, index, size
from opkit.compiler.ir.kernel import (
    Accumulator,
    FusionRefusal,
    Kernel,
    KernelArgument,
    KernelLaunch,
    Let,
    Loop,
    Schedule,
    Scratch,
    Store,
    Update,
)
from opkit.compiler.ir.printer import kernel_text, program_text, schedule_text
from opkit.compiler.ir.program import Buffer, Compute, Extern, Program, ScalarItem, Strided

N = size("n")
A, B = axis(0, 8), axis(1, N)


def test_a_kernel():
    x = load("x", "f32", A * N + B)
    body = (
        Scratch("t", "f32", N),
        Accumulator("s", "f32", "sum"),
        Loop(Axis(1, N), (Update("s", "sum", x), Store("t", B, x)), "vector"),
        Let("m", var("s", "f32")),
        Accumulator("g", "f32", "argmax"),
        Loop(Axis(1, N), (Update("g", "argmax", x, B),), stop=(B, index(5))),
        Store("y", A, op("add", var("m", "f32"), const(1.0, "f32")), "add", atomic=True),
    )
    given = (KernelArgument("x", "f32", False), KernelArgument("y", "f32", True))
    kernel = Kernel("k", given, ("n",), (Loop(Axis(0, index(8)), body, "parallel"),), 4, ("aten.sum",))
    assert kernel_text(kernel).splitlines() == [
        "kernel k(x: f32, y: f32 written, n) grain 4",
        "  # aten.sum",
        "  parallel a0 < 8:",
        "    scratch t: f32[n]",
        "    accumulator s: f32 sum",
        "    vector a1 < n:",
        "      s sum= x[a0*n + a1]",
        "      t[a1] = x[a0*n + a1]",
        "    m = s",
        "    accumulator g: f32 argmax",
        "    for a1 < n while a1 < 5:",
        "      g argmax= x[a0*n + a1] at a1",
        "    y[a0] atomic add= add(m, 1.0)",
    ]


def test_a_schedule():
    shape, strides = (index(8), N), (N, index(1))
    buffers = {n: Buffer(n, "f32", shape, strides, "input" if n == "x" else "made") for n in ("x", "y")}
    whole = Strided("y", shape, strides, index(0))
    made = Compute("y", shape, (A, B), load("x", "f32", A, B), origin="aten.clone")
    call = Extern(
        "aten.f", (whole, [ScalarItem("x"), 1]), {"k": None}, ("y", None), frozenset({"x"}), out=True, reason="why"
    )
    program = Program("p", ("x", N), buffers, (made, call), (whole,), {"n": 3})
    assert program_text(program).splitlines() == [
        "program p(x, n)",
        "  input x: f32[8, n] strides (n, 1)",
        "  made y: f32[8, n] strides (n, 1)",
        "  y[a0, a1] = x[a0, a1]  for a0 < 8, a1 < n  # aten.clone",
        "  y, _ = call aten.f(y[8, n; n, 1; 0], [item x, 1], k=None)  (writes x; into; why)",
        "  return y[8, n; n, 1; 0]",
    ]
    kernel = Kernel("k", (KernelArgument("a", "f32", True),), (), (Store("a", index(0), const(0.0, "f32")),))
    schedule = Schedule(
        program,
        buffers,
        (KernelLaunch(kernel, ("y",), ("n",)), call),
        {"y": index(64)},
        N,
        (FusionRefusal("a", "b", "far"),),
    )
    text = schedule_text(schedule).splitlines()
    assert text[0] == "schedule p: arena of n bytes"
    assert text[2] == "  made y: f32[8, n] strides (n, 1) at 64"
    assert text[3] == "  launch k(y, n)"
    assert text[-3:] == ["kernel k(a: f32 written)", "  a[0] = 0.0", "not fused: a and b: far"]
