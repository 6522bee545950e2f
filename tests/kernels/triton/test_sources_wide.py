"""64-bit indexing, read in Triton's IR: every address is reckoned from program ids in int64."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import triton
import triton.language as tl
from triton.compiler import code_generator
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from opkit.errors import CompileError
from opkit.kernels.triton.compiling import CompileRequest, build, lowered

pytestmark = [
    pytest.mark.usefixtures("triton_cache"),
    pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated"),  # Triton 3.6 says so
]

TARGETS = ["sm_80", "sm_90", "gfx942"]


@triton.jit
def elementwise(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out + at, tl.load(x + at, mask=mask) + tl.load(y + at, mask=mask), mask=mask)


@triton.jit
def rows(x, out, stride, d, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    value = tl.load(x + row * stride + columns, mask=columns < d, other=0.0).to(tl.float32)
    tl.store(out + row * stride + columns, value * tl.rsqrt(tl.sum(value * value) / d + eps), mask=columns < d)


@triton.jit
def swizzled(group, m, n, GROUP: tl.constexpr):
    pid = tl.program_id(0)
    first = pid // (GROUP * n) * GROUP
    size = min(m - first, GROUP)
    return first + pid % (GROUP * n) % size, pid % (GROUP * n) // size


@triton.jit
def tiles(a, b, c, M, N, K, sa, sb, sc, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    row, column = swizzled(8, tl.cdiv(M, BM), tl.cdiv(N, BN), 8)
    i, j = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    left, right = a + i[:, None] * sa + k[None, :], b + k[:, None] * sb + j[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, tl.cdiv(K, BK)):  # noqa: PIE808 - an int32 and an int64
        inside = k < K - start * BK
        total = tl.dot(tl.load(left, mask=inside[None, :]), tl.load(right, mask=inside[:, None]), total)
        left += BK
        right += BK * sb
    tl.store(c + i[:, None] * sc + j[None, :], total, mask=(i[:, None] < M) & (j[None, :] < N))


@triton.jit
def persistent(x, out, n, BLOCK: tl.constexpr):
    for tile in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


@triton.jit
def carried(x, out, stride, n, BLOCK: tl.constexpr):
    offset = 0
    for _ in range(n):
        offset += stride
    where = tl.program_id(0)
    while where < n:
        where += tl.num_programs(0)
    at = offset + where + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at))


@triton.jit
def branches(x, out, n, BLOCK: tl.constexpr):
    start = 0
    if n > 5:
        start = tl.program_id(0) * BLOCK
    if n > 7:  # noqa: SIM108 - not the same to Triton
        last = tl.num_programs(0)
    else:
        last = 0
    at = start + last + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at))


@triton.jit
def counted(x, out, n, BLOCK: tl.constexpr):
    """An int32 of its own that no wide one is added to."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = 0
    for _ in range(3):
        count += tl.sum((tl.load(x + at, mask=at < n) > 0).to(tl.int32))
    tl.store(out + tl.program_id(0), count)


@triton.jit
def blocks(x, out, n, m, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK
    source = tl.make_block_ptr(x, (n, m), (m, 1), (row, 0), (BLOCK, BLOCK), (1, 0))
    described = tl.make_tensor_descriptor(out, [n, m], [m, 1], [BLOCK, BLOCK])
    described.store([row, 0], tl.load(source, boundary_check=(0, 1)))


@triton.jit
def dropped(x, out, n, p, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.rand(seed, at) > p
    tl.store(out + at, tl.where(keep, tl.load(x + at, mask=at < n), 0.0), mask=at < n)


@triton.jit(noinline=True)
def position(BLOCK: tl.constexpr):
    return tl.program_id(0) * BLOCK


@triton.jit
def not_inlined(x, out, n, BLOCK: tl.constexpr):
    at = position(BLOCK) + tl.arange(0, BLOCK)
    tl.atomic_add(out + at, tl.load(x + at, mask=at < n), mask=at < n)


POINTERS = ("x", "y", "out", "a", "b", "c")
FLOATS = ("eps", "p")
KERNELS = [elementwise, blocks, not_inlined, dropped, tiles, rows, persistent, carried, branches, counted]


def request(function, target="sm_90", wide=True):
    types = dict.fromkeys(POINTERS, "*fp32") | dict.fromkeys(FLOATS, "fp32")
    constants = {name: 64 for name in function.arg_names if name.isupper() and len(name) > 1}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in function.arg_names}
    kept = {name: "i64" if wide and kind == "i32" else kind for name, kind in signature.items()}
    return CompileRequest(function, kept, constants, frozenset(), {}, target, wide=wide)


def names(function):
    return function.__name__


@pytest.mark.sweep(4)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("function", KERNELS, ids=names)
def test_usual_kernels_compile(function, target):
    build(request(function, target))


def source_of(function, **options):
    """The IR that the code generator made, without locations."""
    text = lowered(request(function, **options)).asm["source"]
    return re.sub(r" loc\(.*\)$", "", text, flags=re.MULTILINE)


@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    "function",
    [elementwise, persistent, branches, blocks, not_inlined, tiles, rows, carried, counted, dropped],
    ids=names,
)
def test_program_ids_are_made_64_bits_wide_and_used_so_alone(function):
    asked = 0
    for text in source_of(function).split("tt.func")[1:]:
        for name in re.findall(r"(%[\w$]+) = tt\.get_(?:program_id|num_programs) [xyz] : i32", text):
            uses = [line for line in text.splitlines() if re.search(rf"{re.escape(name)}\b", line.partition("=")[2])]
            assert uses
            assert all(re.search(rf"arith\.extsi {re.escape(name)} : i32 to i64", line) for line in uses)
            asked += 1
    assert asked


@pytest.mark.parametrize("function", [elementwise, rows, tiles, persistent, carried, branches, not_inlined], ids=names)
def test_offsets_are_64_bits_wide_where_they_are_added(function):
    added = re.findall(r"tt\.addptr .* : .*, (\S+)", source_of(function))
    scalars = re.findall(r"arith\.muli .* : (i32)", source_of(function))
    assert added
    assert not scalars
    within = {"tensor<64xi32>"} if function is rows else set()  # the columns, added to a row's address
    steps = {"tensor<1x64xi32>", "tensor<64x64xi32>"} if function is tiles else set()  # k, and BK of each step
    assert {kind for kind in added if "i32" in kind} <= within | steps


def test_without_it_they_are_not():
    assert "tensor<64xi64>" not in "".join(re.findall(r"tt\.addptr .*", source_of(elementwise, wide=False)))


def test_what_is_reckoned_is_that_of_64_bits_in_machine_code():
    wide, narrow = (lowered(request(elementwise, wide=wide)).asm["ptx"] for wide in (True, False))
    assert re.search(r"cvt\.[su]64\.[su]32|mad\.wide|mul\.wide|shl\.b64", wide)
    assert re.search(r"setp\.\w+\.s64", wide)  # at < n
    assert not re.search(r"setp\.\w+\.s64", narrow)


def test_variables_that_need_not_grow_do_not():
    assert re.search(r"scf\.for .* -> \(i32\)", source_of(counted))


@gluon.jit
def gluon_rows(x, out, n, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    at = gl.arange(0, BLOCK, LAYOUT)
    for row in range(gl.program_id(0), n, gl.num_programs(0)):
        gl.store(out + row * n + at, gl.load(x + row * n + at, mask=at < n), mask=at < n)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("target", ["sm_90", "gfx942", "sm_80", "sm_100"])
def test_gluon(target):
    constants = {"BLOCK": 1024, "LAYOUT": gl.BlockedLayout([1], [64 if target == "gfx942" else 32], [4], [0])}
    signature = {"x": "*fp32", "out": "*fp32", "n": "i64"} | dict.fromkeys(constants, "constexpr")
    asked = CompileRequest(gluon_rows, signature, constants, options={"maxnreg": 128}, target=target, wide=True)
    build(asked)
    text = lowered(asked).asm["source"]
    assert "arith.extsi" in text
    assert re.search(r"scf\.for .* : i64", text)


@triton.jit
def undecided(x, n):
    value = tl.program_id(0) if n > 3 else tl.load(x)
    tl.store(x, value)


def test_what_cannot_be_of_64_bits_is_told_with_the_authors_line():
    asked = CompileRequest(undecided, {"x": "*i32", "n": "i64"}, {}, wide=True)
    with pytest.raises(
        CompileError, match=r"undecided could not be compiled, with 64-bit indexing, for sm_90: .*\.py:"
    ):
        build(asked)


def test_triton_is_left_as_it_is():
    def state():
        return {name: dict(vars(value)) if isinstance(value, type) else value for name, value in vars(module).items()}

    module = code_generator
    before = state()
    with ThreadPoolExecutor(4) as pool:
        made = list(
            pool.map(lambda wide: lowered(request(persistent, "sm_100", wide)).asm["source"], [True, False] * 4)
        )
    assert state() == before
    assert {"i64" in text for text in made[::2]} == {True}
    assert {"extsi" in text and ": i64 loc" in text and "scf.for" in text for text in made[::2]} == {True}
    assert len(set(made[1::2])) == 1
