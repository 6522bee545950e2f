"""Compiling for architectures that this machine has not, and what a launch of the result must pass."""

import concurrent.futures
import dataclasses
import inspect
import re

import pytest
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from opkit.errors import ArgumentError, CompileError, KernelError
from opkit.kernels.triton import binaries, compiling
from opkit.kernels.triton.compiling import Binary, CompileRequest, Param, build, identity, lowered

pytestmark = pytest.mark.usefixtures("triton_cache")
TARGETS = ["sm_90", "sm_80", "gfx942", "sm_100", "sm_120"]
THREE = ["sm_80", "sm_90", "gfx942"]


@triton.jit
def scale(x, out, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * factor, mask=at < n)


SCALE = CompileRequest(
    scale,
    {"x": "*bf16", "out": "*bf16", "n": "i32", "factor": "fp32", "BLOCK": "constexpr"},
    {"BLOCK": 128},
    frozenset({"x", "out"}),
)


@triton.jit
def every(p, a, b, c, d, e, f, g, h, i, j, k, l, m):  # noqa: E741
    total = a.to(tl.float64) + b + c + d + e + f + g + h + i + j + k + l + m
    tl.store(p, total.to(tl.float32))


EVERY = {
    "p": "*fp32",
    "a": "i1",
    "b": "u1",
    "c": "i8",
    "d": "u8",
    "e": "i16",
    "f": "u16",
    "g": "i32",
    "h": "u32",
    "i": "i64",
    "j": "u64",
    "k": "fp16",
    "l": "bf16",
    "m": "fp64",
}


@triton.jit
def move(source, target, rows, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK
    if at < rows:
        target.store([at, 0], source.load([at, 0]))


MOVE = CompileRequest(
    move,
    {"source": "tensordesc<fp16[32, 64]>", "target": "tensordesc<fp16[32, 64]>", "rows": "i32", "BLOCK": "constexpr"},
    {"BLOCK": 32},
)


@triton.jit
def multiply(a, b, c, K, M: tl.constexpr, N: tl.constexpr, KB: tl.constexpr, WS: tl.constexpr):
    row, column = tl.program_id(0) * M, tl.program_id(1) * N
    total = tl.zeros((M, N), tl.float32)
    for k in tl.range(0, tl.cdiv(K, KB), warp_specialize=WS):
        total = tl.dot(a.load([row, k * KB]), b.load([column, k * KB]).T, total)
    c.store([row, column], total.to(tl.float16))


MULTIPLY = CompileRequest(
    multiply,
    {
        "a": "tensordesc<fp16[128, 64]>",
        "b": "tensordesc<fp16[128, 64]>",
        "c": "tensordesc<fp16[128, 128]>",
        "K": "i32",
    }
    | dict.fromkeys(("M", "N", "KB", "WS"), "constexpr"),
    {"M": 128, "N": 128, "KB": 64, "WS": True},
    options={"num_warps": 4, "num_stages": 3},
    target="sm_100",
)


@gluon.jit
def gluon_scale(x, out, n, factor, BLOCK: gl.constexpr, layout: gl.constexpr):
    at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout)
    gl.store(out + at, gl.load(x + at, mask=at < n) * factor, mask=at < n)


def gluon_request(target):
    lanes = 64 if target.startswith("gfx") else 32
    return CompileRequest(
        gluon_scale,
        dict(SCALE.signature) | {"layout": "constexpr"},
        {"BLOCK": 1024, "layout": gl.BlockedLayout([1], [lanes], [4], [0])},
        target=target,
    )


def kinds(binary: Binary) -> list[str]:
    return [param.kind for param in binary.params]


def ptx_sizes(request: CompileRequest) -> list[int]:
    """The sizes of the parameters as PTX declares them: ``.param .u64 a``, ``.param .align 128 .b8 b[128]``."""
    header = re.search(r"\.entry [^(]*\((.*?)\n\)", lowered(request).asm["ptx"], re.DOTALL)
    assert header
    found = re.findall(r"\.param (?:\.align \d+ )?\.[a-z](\d+)[^\n\[]*(?:\[(\d+)\])?", header[1])
    return [int(bits) // 8 * int(count or 1) for bits, count in found]


# ---- what the compiled function takes --------------------------------------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize("target", TARGETS)
def test_pointers_numbers_and_scratch_are_passed_in_order(target):
    binary = build(dataclasses.replace(SCALE, target=target))
    assert kinds(binary) == ["ptr", "ptr", "i32", "fp32", "scratch", "profile_scratch"]
    assert [param.name for param in binary.params] == ["x", "out", "n", "factor", "", ""]
    assert (binary.form, binary.target) == ("hsaco" if target == "gfx942" else "cubin", target)
    assert binary.image.startswith(b"\x7fELF")
    assert binary.name == "scale"
    assert binary.threads == 4 * (64 if target == "gfx942" else 32)
    assert (binary.cluster, binary.cooperative, binary.pdl, binary.shared) == ((1, 1, 1), False, False, 0)


@pytest.mark.parametrize("target", THREE)
def test_every_scalar_type_takes_the_bytes_that_it_is_passed_as(target):
    request = CompileRequest(every, EVERY, {}, target=target)
    binary = build(request)
    assert [param.size for param in binary.params] == [8, 1, 1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 8, 8, 8]
    assert binaries.parameter_sizes(binary) == [param.size for param in binary.params]
    if target != "gfx942":
        assert ptx_sizes(request) == [param.size for param in binary.params]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("target", TARGETS)
def test_a_descriptor_is_a_map_where_the_hardware_has_them(target):
    request = dataclasses.replace(MOVE, target=target)
    binary = build(request)
    sizes = ["size32", "size32", "stride64", "stride64"]
    flags = ["padding_nan", "round_tf32"][: 1 if triton.__version__.startswith("3.6.") else 2]
    apart = ["ptr", "size64", "size64", "stride64", "stride64", *flags]
    each = ["map", *sizes] if target not in ("sm_80", "gfx942") else [*apart, *sizes]
    assert kinds(binary) == [*each, *each, "i32", "scratch", "profile_scratch"]
    assert {param.name for param in binary.params[: len(each)]} == {"source"}
    if target != "gfx942":
        assert ptx_sizes(request) == [param.size for param in binary.params]


def test_a_map_says_how_it_is_encoded():
    source, target = build(dataclasses.replace(MOVE, target="sm_90")).maps
    # swizzle 3 is CU_TENSOR_MAP_SWIZZLE_128B, element type 6 CU_TENSOR_MAP_DATA_TYPE_FLOAT16
    expected = {"swizzle": 3, "elem_size": 2, "elem_type": 6, "block": [32, 64], "fp4_padded": False}
    assert source == {"name": "source"} | expected
    assert target == {"name": "target"} | expected
    assert build(dataclasses.replace(MOVE, target="sm_80")).maps == ()


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("type", "number"), [("bf16", 9), ("fp32", 7), ("u8", 0), ("i32", 3), ("fp16", 6)])
def test_element_types_of_maps_are_those_of_the_driver(type, number):
    signature = dict(MOVE.signature) | dict.fromkeys(("source", "target"), f"tensordesc<{type}[32, 64]>")
    maps = build(dataclasses.replace(MOVE, signature=signature, target="sm_90")).maps
    assert [entry["elem_type"] for entry in maps] == [number, number]


def test_constants_and_absent_pointers_are_not_passed():
    request = dataclasses.replace(
        SCALE, signature=dict(SCALE.signature) | {"factor": "constexpr"}, constexprs={"BLOCK": 128, "factor": 2}
    )
    assert kinds(build(request)) == ["ptr", "ptr", "i32", "scratch", "profile_scratch"]


# ---- how it is launched ----------------------------------------------------------------------------------------------


def test_warps_of_their_own_are_counted_among_the_threads():
    binary, plain = (
        build(MULTIPLY),
        build(dataclasses.replace(MULTIPLY, constexprs=MULTIPLY.constexprs | {"WS": False})),
    )
    required = re.search(r"\.reqntid (\d+)", lowered(MULTIPLY).asm["ptx"])
    assert required
    assert binary.threads == int(required[1]) > plain.threads == 128
    assert binary.shared > 48 << 10


def test_blocks_of_a_cluster():
    request = dataclasses.replace(SCALE, target="sm_90", options={"num_ctas": 2, "num_warps": 8})
    binary = build(request)
    assert (binary.cluster, binary.threads) == ((2, 1, 1), 256)


def test_cooperative_and_dependent_launches():
    options = {"launch_cooperative_grid": True, "launch_pdl": True}
    binary = build(dataclasses.replace(SCALE, options=options))
    assert binary.cooperative
    assert binary.pdl


@pytest.mark.sweep(3)
@pytest.mark.parametrize("target", TARGETS)
def test_gluon(target):
    binary = build(gluon_request(target))
    assert kinds(binary) == ["ptr", "ptr", "i32", "fp32", "scratch", "profile_scratch"]
    assert binary.name == "gluon_scale"


def test_what_sixteen_divides_is_loaded_many_at_once():
    scalar = dataclasses.replace(SCALE, divisible=frozenset())
    every_one = dataclasses.replace(SCALE, divisible=frozenset({"x", "out", "n"}), options={"num_warps": 1})
    assert "ld.global.v2.b32" in lowered(every_one).asm["ptx"]
    assert ".v2" not in lowered(scalar).asm["ptx"]


@pytest.mark.parametrize("request_", [SCALE, dataclasses.replace(MOVE, target="sm_90")], ids=["scale", "move"])
def test_a_binary_is_described_in_json(request_):
    import json

    binary = build(request_)
    fields = json.loads(json.dumps(binary.to_json()))
    assert Binary.from_json(fields, binary.image) == binary
    assert "image" not in fields


def test_several_threads_compile_at_once():
    requests = [
        dataclasses.replace(SCALE, constexprs={"BLOCK": 256}, target=target, wide=wide)
        for target in TARGETS
        for wide in (False, True)
    ]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        at_once = list(pool.map(build, requests))
    assert [binary.target for binary in at_once] == [request.target for request in requests]
    assert [build(request) for request in requests] == at_once


# ---- identity --------------------------------------------------------------------------------------------------------


@triton.jit
def half(x):
    return x / 2


@triton.jit
def uses_half(x):
    tl.store(x, half(tl.load(x)))


def test_identity_is_of_everything_that_decides_the_code():
    changes = [
        {"constexprs": {"BLOCK": 256}},
        {"constexprs": {"BLOCK": 128.0}},
        {"divisible": frozenset({"x"})},
        {"options": {"num_warps": 8}},
        {"target": "sm_80"},
        {"wide": True},
        {"offsets": True},
        {"signature": dict(SCALE.signature) | {"n": "i64"}},
    ]
    found = [identity(dataclasses.replace(SCALE, **change)) for change in changes]
    assert len({identity(SCALE), *found}) == len(changes) + 1
    assert identity(dataclasses.replace(SCALE, divisible=frozenset(["out", "x"]))) == identity(SCALE)
    assert identity(dataclasses.replace(SCALE, target="sm_90a")) == identity(SCALE)


def test_a_function_given_as_a_constant_counts_with_its_source():
    def request(function):
        return dataclasses.replace(SCALE, constexprs={"BLOCK": function})

    assert identity(request(half)) != identity(request(uses_half))
    assert identity(request(half)) == identity(request(half))


# ---- what is refused -------------------------------------------------------------------------------------------------


@triton.jit
def adds_a_pointer(x, y):
    return x + y


@triton.jit
def wrong(x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, adds_a_pointer(x + at, x + at))


def line_of(function, text):
    lines, start = inspect.getsourcelines(function.fn)
    return start + next(number for number, line in enumerate(lines) if text in line)


@pytest.mark.parametrize("wide", [False, True])
def test_an_error_names_the_authors_line(wide):
    request = CompileRequest(wrong, {"x": "*fp32", "BLOCK": "constexpr"}, {"BLOCK": 128}, wide=wide)
    with pytest.raises(CompileError) as caught:
        build(request)
    message = str(caught.value)
    assert f"{__file__}:{line_of(adds_a_pointer, 'return x + y')}" in message
    assert message.startswith("Triton kernel wrong could not be compiled")
    assert "for sm_90" in message
    assert message.endswith("return x + y")
    assert "at 2:" in caught.value.log  # Triton's own listing


@triton.jit
def not_a_power(x, BLOCK: tl.constexpr):
    tl.store(x, tl.cdiv(BLOCK, 3) + tl.sum(tl.arange(0, BLOCK)))


def test_an_error_inside_triton_names_the_line_that_led_there():
    with pytest.raises(CompileError, match="power of 2") as caught:
        build(CompileRequest(not_a_power, {"x": "*fp32", "BLOCK": "constexpr"}, {"BLOCK": 100}))
    assert f"{__file__}:{line_of(not_a_power, 'tl.store')}" in str(caught.value)


@triton.jit
def third_of_two(x):
    tl.store(x, (x, x)[2])


def test_an_error_of_a_tuple_of_tritons_names_its_line():
    with pytest.raises(CompileError, match="index") as caught:
        build(CompileRequest(third_of_two, {"x": "*fp32"}, {}))
    assert f"{__file__}:{line_of(third_of_two, 'tl.store')}" in str(caught.value)


@triton.jit
def assembly(x):
    tl.store(x, tl.inline_asm_elementwise("no.such.instruction $0;", "=r", [], tl.int32, True, 1))


def test_what_ptxas_refuses_can_be_repeated(capfd):
    with pytest.raises(CompileError, match=r"assembly .* for sm_90: .*Internal Triton PTX") as caught:
        build(CompileRequest(assembly, {"x": "*i32"}, {}))
    capfd.readouterr()  # Triton prints the PTX
    assert caught.value.command[0].endswith(("ptxas", "ptxas-blackwell"))
    assert re.search(r"\.ptx, line \d+; error", caught.value.log)
    assert f"{__file__}:" in str(caught.value)


def test_an_unknown_option_is_named_with_what_is_near():
    with pytest.raises(KernelError, match=r"scale: num_warp is neither .* did you mean num_warps"):
        build(dataclasses.replace(SCALE, options={"num_warp": 4}))
    with pytest.raises(KernelError, match=r"did you mean .*BLOCK"):
        build(dataclasses.replace(SCALE, options={"BLOCKS": 4}))


def test_an_option_that_cannot_be_is_refused():
    with pytest.raises(KernelError, match=r"scale: Triton refuses num_warps=3 for sm_90: .*power of 2"):
        build(dataclasses.replace(SCALE, options={"num_warps": 3}))
    with pytest.raises(KernelError, match=r"num_ctas=2 for sm_80"):
        build(dataclasses.replace(SCALE, options={"num_ctas": 2}, target="sm_80"))


def test_an_option_of_another_vendor_changes_nothing():
    assert build(dataclasses.replace(SCALE, options={"waves_per_eu": 2})) == build(SCALE)
    amd = dataclasses.replace(SCALE, target="gfx942")
    assert build(dataclasses.replace(amd, options={"maxnreg": 64})) == build(amd)


def test_a_request_must_fit_its_function():
    with pytest.raises(KernelError, match="scale: the signature has the parameters x, n; the function has x, out"):
        build(dataclasses.replace(SCALE, signature={"x": "*bf16", "n": "i32"}))
    with pytest.raises(KernelError, match="differ in factor"):
        build(dataclasses.replace(SCALE, constexprs={"BLOCK": 128, "factor": 1.0}))
    with pytest.raises(KernelError, match="is a function; expected what @triton"):
        build(dataclasses.replace(SCALE, function=ptx_sizes))
    with pytest.raises(ArgumentError, match="sm_80, sm_90"):
        build(dataclasses.replace(SCALE, target="volta"))


def test_other_rules_of_another_release_are_found(monkeypatch):
    monkeypatch.setattr(compiling.binaries, "params", lambda *given: (Param("ptr", "x"),))
    with pytest.raises(KernelError, match=r"scale: .* \[8, 8, 4, 4, 8, 8\] bytes where opkit passes \[8\]"):
        build(dataclasses.replace(SCALE, options={"num_warps": 2}))
