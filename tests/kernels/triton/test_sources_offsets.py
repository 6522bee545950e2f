"""Grids in pieces, read in Triton's IR: ids are shifted, and the number of programs is the whole grid's."""

import re

import pytest
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from opkit.errors import KernelError
from opkit.kernels.triton.compiling import CompileRequest, build, lowered
from opkit.kernels.triton.sources import rewritten

pytestmark = pytest.mark.usefixtures("triton_cache")
TARGETS = ["sm_90", "gfx942", "sm_80", "sm_100"]


@triton.jit
def last(axis: tl.constexpr):
    return tl.num_programs(axis) - 1


@triton.jit
def reports(out, n):
    """Every id and size, in the kernel, in a function of its own, and in a loop."""
    tl.store(out, tl.program_id(0))
    tl.store(out + 1, tl.program_id(1))
    tl.store(out + 2, tl.program_id(2))
    for at in range(n):
        tl.store(out + 3 + at, last(0) * last(1) + last(2) + tl.program_id(0))


@triton.jit
def nothing():
    tl.device_print("", tl.program_id(0))


@triton.jit(noinline=True)
def own():
    return tl.program_id(0)


@triton.jit
def calls_own(out):
    tl.store(out, own())


@gluon.jit
def gluon_reports(out, LAYOUT: gl.constexpr):
    at = gl.program_id(1) * 128 + gl.arange(0, 128, LAYOUT)
    gl.store(out + at, at + gl.num_programs(0))


def request(target="sm_90", wide=False, offsets=True):
    return CompileRequest(reports, {"out": "*i64", "n": "i64"}, {}, target=target, wide=wide, offsets=offsets)


def entry(text):
    """A kernel's parameters and operations, by name."""
    head = re.search(r"tt\.func public @\w+\((.*)\) attributes", text)
    assert head
    names = re.findall(r"(%[\w$]+):", re.sub(r"loc\(.*?\)+", "", head[1]))
    found = re.findall(r"^ *(%[\w$]+) = (\S+) (.*?)(?: : .*)?$", text, re.MULTILINE)
    return names, {name: (operation, operands) for name, operation, operands in found}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("wide", [False, True])
def test_the_parameters_come_last_and_are_passed(target, wide):
    binary = build(request(target, wide))
    pieces = [(kind, axis) for kind in ("offset", "total") for axis in range(3)]
    assert [(param.kind, param.detail) for param in binary.params[2:]] == [
        *pieces,
        ("scratch", 0),
        ("profile_scratch", 0),
    ]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("target", TARGETS)
def test_ids_are_shifted_and_sizes_are_the_whole_grids(target):
    text = lowered(request(target)).asm["ttir"]
    names, operations = entry(text)
    offsets, totals = names[2:5], names[5:8]
    ids = {operands: name for name, (operation, operands) in operations.items() if operation == "tt.get_program_id"}
    assert sorted(ids) == ["x", "y", "z"]
    for axis, offset in zip("xyz", offsets, strict=True):
        uses = [used for used in operations.values() if re.search(rf"{re.escape(ids[axis])}\b", used[1])]
        assert uses
        assert set(uses) == {("arith.addi", f"{ids[axis]}, {offset}")}
    assert "get_num_programs" not in text
    assert all(re.search(rf"{re.escape(total)}, ", text) for total in totals)


def test_with_64_bits_ids_are_shifted_before_they_are_widened():
    text = lowered(request(wide=True)).asm["ttir"]
    names, operations = entry(text)
    shifted = [name for name, (kind, operands) in operations.items() if kind == "arith.addi" and names[2] in operands]
    assert any(re.search(rf"arith\.extsi {re.escape(name)} : i32 to i64", text) for name in shifted)


def test_without_it_nothing_is_added():
    assert len(build(request(offsets=False)).params) == 4


@pytest.mark.sweep(2)
@pytest.mark.parametrize("target", TARGETS)
def test_a_function_without_parameters(target):
    build(CompileRequest(nothing, {}, {}, target=target, offsets=True))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("target", TARGETS)
def test_gluon(target, wide):
    layout = gl.BlockedLayout([1], [64 if target == "gfx942" else 32], [4], [0])
    signature = {"out": "*i32", "LAYOUT": "constexpr"}
    asked = CompileRequest(gluon_reports, signature, {"LAYOUT": layout}, target=target, wide=wide, offsets=True)
    assert len(build(asked).params) == 9
    _, operations = entry(lowered(asked).asm["source"])
    assert [operation for operation, _ in operations.values()].count("arith.addi") >= 2
    assert "get_num_programs" not in lowered(asked).asm["source"]


@pytest.mark.parametrize("wide", [False, True])
def test_a_function_that_is_not_inlined_may_not_ask(wide):
    asked = CompileRequest(calls_own, {"out": "*i32"}, {}, wide=wide, offsets=True)
    with pytest.raises(KernelError, match=r"calls_own: its grid is larger .* not inlined .* leave noinline=True out"):
        build(asked)


@gluon.jit
def part(out):
    gl.store(out, gl.program_id(0))


@gluon.jit
def parts(out):
    gl.warp_specialize([(part, (out,)), (part, (out,))], [4], [24])


def test_nor_may_a_part_that_runs_in_warps_of_its_own(capfd):
    with pytest.raises(KernelError, match=r"parts: its grid is larger .* in warps of its own\. Take it in the kernel"):
        build(CompileRequest(parts, {"out": "*i32"}, {}, target="sm_100", offsets=True))
    capfd.readouterr()  # MLIR prints what it refuses


def test_ir_without_a_kernel_is_refused():
    with pytest.raises(KernelError, match=r"odd: .* no function in its IR"):
        rewritten("module {\n}\n", "odd")


def test_the_result_is_kept_apart_in_tritons_cache():
    assert build(request(offsets=False)).image != build(request()).image
    assert build(request(wide=True)) != build(request()) == build(request())
