"""Functions of rows (``query=``, ``key=``, ``output=``): what they compute, their gradients, transforms, compilers, mistakes."""

import pytest
import torch
import torch.nn.functional as F
from row_functions import (
    COS,
    KEYS,
    LEARNED,
    QUERIES,
    SHARED,
    SIN,
    B,
    D,
    H,
    formula,
    inputs,
    interleaved,
    normed,
    normed_and_rotated,
    partial,
    rotary,
    rotated,
    row_by_row,
)

import opkit
from opkit.errors import ArgumentError, ArgumentTypeError, DtypeError, ShapeError
from opkit.masks import Causal

CASES = {
    "rotary, halves": ({"query": rotary, "key": rotary}, ()),
    "rotary, neighbours": ({"query": interleaved, "key": interleaved}, ()),
    "rotary of a part": ({"query": partial, "key": partial}, ()),
    "norms": ({"query": normed(LEARNED["weight"]), "key": normed(LEARNED["weight"])}, ("weight",)),
    "norm and rotary": ({"query": normed_and_rotated(LEARNED["weight"]), "key": rotary}, ("weight",)),
    "added positions": ({"key": lambda x, b, h, j: x + LEARNED["table"][j]}, ("table",)),
    "gate": ({"output": lambda x, b, h, i: x * torch.sigmoid(LEARNED["gate"][b, h, i])}, ("gate",)),
    "silu of a channel": ({"output": lambda x, b, h, i: x * F.silu(LEARNED["gate"][b, h, i, 0])}, ("gate",)),
    "scales of heads": ({"output": lambda x, b, h, i: x * LEARNED["scales"][h]}, ("scales",)),
    "all three": (
        {
            "query": normed_and_rotated(LEARNED["weight"]),
            "key": rotary,
            "output": lambda x, b, h, i: F.rms_norm(x, (D,)) * torch.sigmoid(LEARNED["gate"][b, h, i]),
        },
        ("weight", "gate"),
    ),
}


@pytest.fixture(autouse=True)
def _learned():
    for x in LEARNED.values():
        x.requires_grad_()


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name):
    functions, learned = CASES[name]
    tensors = inputs()
    wanted = [*tensors, *(LEARNED[each] for each in learned)]
    found = opkit.attention(*tensors, mask=Causal("bottom-right"), **functions)
    right = formula(*tensors, **functions)
    torch.testing.assert_close(found, right)
    assert found.is_contiguous()
    gradient = torch.randn_like(found)
    torch.testing.assert_close(*(torch.autograd.grad(x, wanted, gradient) for x in (found, right)))


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_layouts(layout):
    functions, _ = CASES["all three"]
    q, k, v = (x.detach()[:, :, :QUERIES] for x in inputs())
    right = formula(q, k, v, **functions)
    given = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    if layout == "thd":
        right, given = right[:1], [x[0] for x in given]
    out, lse = opkit.attention(*given, mask=Causal(), layout=layout, return_lse=True, **functions)
    torch.testing.assert_close(out if layout == "bshd" else out.unsqueeze(0), right.transpose(1, 2))
    assert out.is_contiguous()
    assert lse.shape == ((B, H, QUERIES) if layout == "bshd" else (H, QUERIES))


def test_packed_sequences_have_positions_of_their_own():
    starts = torch.tensor([0, 2, KEYS])
    positions = torch.cat([torch.arange(2), torch.arange(KEYS - 2)])
    q, k, v = (x.detach()[0, :SHARED].transpose(0, 1) for x in inputs(queries=KEYS))

    def of_own(x, b, h, at):
        return rotary(x, b, h, positions[at])

    packed = opkit.masks.VarLen(starts) & Causal()
    out = opkit.attention(q, k, v, mask=packed, query=of_own, key=of_own, layout="thd")
    alone = opkit.attention(q[2:], k[2:], v[2:], mask=Causal(), query=rotary, key=rotary, layout="thd")
    torch.testing.assert_close(out[2:], alone)


def test_narrow_dtypes_are_computed_in_float32_and_rounded_once():
    q, k, v = (x.detach() for x in inputs(torch.bfloat16))
    seen = []

    def scaled(x, b, h, at):
        seen.append(x.dtype)
        return x * torch.tensor(1 / 3, dtype=torch.float64).sqrt() * COS[at].float()

    found = opkit.attention(q, k, v, query=scaled, output=scaled)
    first = row_by_row(scaled, q.float()).bfloat16()
    right = row_by_row(scaled, opkit.attention(first, k, v).float()).bfloat16()
    assert torch.equal(found, right)
    assert found.dtype == torch.bfloat16
    assert set(seen) == {torch.float32}


def test_autocast_does_not_reach_a_function():
    q, k, v = (x.detach() for x in inputs(torch.float32))
    turn = torch.randn(D, D)

    def turned(x, b, h, at):
        return x @ turn

    with torch.autocast("cpu", torch.bfloat16):
        found = opkit.attention(q, k, v, query=turned)
    right = opkit.attention((q @ turn).bfloat16(), k.bfloat16(), v.bfloat16())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, right)


def test_a_function_may_write_to_its_row():
    q, k, v = (x.detach() for x in inputs())
    before = q.clone()

    def halved(x, b, h, at):
        x *= 0.5
        return x

    torch.testing.assert_close(opkit.attention(q, k, v, query=halved), opkit.attention(q * 0.5, k, v))
    assert torch.equal(q, before)


def test_other_head_sizes():
    q, k, v = (x.detach() for x in inputs())
    wider = torch.randn(D, 3 * D, dtype=torch.float64)
    found = opkit.attention(
        q, k, v, query=lambda x, b, h, i: x @ wider, key=lambda x, b, h, j: x @ wider, output=lambda x, b, h, i: x[:3]
    )
    torch.testing.assert_close(found, opkit.attention(q @ wider, k @ wider, v)[..., :3])


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 3, 3), (2, 0, 3), (2, 3, 0)])
def test_no_rows(batch, queries, keys):
    tensors = inputs(batch=batch, queries=queries, keys=keys)
    norm = normed(LEARNED["weight"])
    out = opkit.attention(*tensors, query=norm, key=norm, output=norm)
    assert out.shape == (batch, H, queries, D)
    assert all(x is not None and not x.any() for x in torch.autograd.grad(out.sum(), tensors))


def test_second_derivatives():
    q, k, v = (x.detach()[:1, :2, :3, :4].requires_grad_() for x in inputs())
    weight, gate = (torch.linspace(*ends, 4, dtype=torch.float64).requires_grad_() for ends in ((0.5, 1), (-1, 1)))

    def call(q, k, v, weight, gate):
        norm = normed(weight)
        return opkit.attention(q, k, v, query=norm, key=norm, output=lambda x, b, h, i: x * torch.sigmoid(gate))

    assert torch.autograd.gradgradcheck(call, (q, k, v, weight, gate))


def test_vmap_and_func_grad():
    q, k, v = (x.detach() for x in inputs())
    gates = torch.stack([LEARNED["gate"].detach(), LEARNED["gate"].detach() - 1])
    several = torch.stack([q, -q])

    def model(q, gate):
        return opkit.attention(
            q, k, v, query=rotary, key=rotary, output=lambda x, b, h, i: x * torch.sigmoid(gate[b, h, i])
        )

    each = [model(*pair) for pair in zip(several, gates, strict=True)]
    torch.testing.assert_close(torch.func.vmap(model)(several, gates), torch.stack(each))
    found = torch.func.grad(lambda gate: model(q, gate).sum())(gates[0])
    gate = gates[0].clone().requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(model(q, gate).sum(), gate)[0])


# ---- compilers -------------------------------------------------------------------------------------------------------


def model(q, k, v, weight, cos, sin, gate):
    """Attention with all three functions, which capture tensors that need gradients."""

    def query(x, b, h, at):
        x = x * torch.rsqrt(x.square().mean() + 1e-6) * weight
        return x * cos[at] + rotated(x) * sin[at]

    return opkit.attention(
        q, k, v, mask=Causal(), query=query, key=query, output=lambda x, b, h, i: x * torch.sigmoid(gate[b, h, i])
    )


def model_inputs(batch, sequence):
    tensors = [torch.randn(batch, heads, sequence, D) for heads in (H, SHARED, SHARED)]
    return *tensors, LEARNED["weight"].detach().float(), COS.float(), SIN.float(), torch.randn(batch, H, sequence, D)


@pytest.mark.sweep(keep=["opkit"])
@pytest.mark.parametrize("backend", ["aot_eager", "opkit", "inductor"])
def test_compiled_code_serves_all_sizes(backend):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    frames = 0
    for batch, sequence in ((3, 9), (5, 33)):
        tensors = model_inputs(batch, sequence)
        wanted = [x.requires_grad_() for x in (*tensors[:4], tensors[6])]
        found, right = (call(*tensors) for call in (compiled, model))
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
        gradient = torch.randn_like(right)
        found, right = (torch.autograd.grad(x, wanted, gradient) for x in (found, right))
        torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-4)
        assert frames in (0, counter.frame_count)
        frames = counter.frame_count


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["norms", "rotary, halves", "gate"])
def test_the_compiler_makes_one_kernel_of_a_function(name):
    functions, _ = CASES[name]
    for x in LEARNED.values():
        x.requires_grad_(False)
    tensors = [x.detach() for x in inputs(torch.float32)]
    explanation = opkit.explain(lambda q, k, v: opkit.attention(q, k, v, **functions), *tensors)
    assert explanation.kernels == len(functions)


class Model(torch.nn.Module):
    def forward(self, *tensors):
        return model(*tensors)


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")  # of strict export, for any mode
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_export(strict):
    tensors = model_inputs(2, 9)
    sequence = torch.export.Dim("sequence", min=4, max=50)
    shapes = (({2: sequence},) * 3 + (None,) * 3 + ({2: sequence},),)
    program = torch.export.export(Model(), tensors, dynamic_shapes=shapes, strict=strict)
    for given in (tensors, model_inputs(2, 20)):
        torch.testing.assert_close(program.module()(*given), model(*given))


# ---- mistakes --------------------------------------------------------------------------------------------------------


def branches(x, b, h, at):
    if at > 3:
        return x
    return x * 2


def too_short(x, b, h, at):
    return x * COS[at, :3]


def test_mistakes_name_the_line():
    with pytest.raises(ArgumentTypeError, match=r"query=branches .*data-dependent control flow.*: if at > 3:"):
        opkit.attention(*inputs(), query=branches)
    with pytest.raises(ArgumentTypeError, match=r"output=too_short .*must match.*: return x \* COS\[at, :3\]\."):
        opkit.attention(*inputs(), output=too_short)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda x, at: x, ArgumentTypeError, r"called as function\(x, b, h, kv_idx\)"),
        (3.0, ArgumentTypeError, r"key must be a function of \(x, b, h, kv_idx\), got float"),
        (lambda x, b, h, j: x.sum(), ShapeError, r"returned shape \(\) for a row of shape \(8,\)"),
        (lambda x, b, h, j: x > 0, DtypeError, r"returned torch.bool"),
        (lambda x, b, h, j: 1.0, ArgumentTypeError, r"returned float, expected a tensor"),
    ],
)
def test_other_mistakes(function, error, message):
    with pytest.raises(error, match=message):
        opkit.attention(*inputs(), key=function)


def test_tensors_are_checked_first():
    q, k, v = inputs()
    with pytest.raises(ShapeError, match="k of shape"):
        opkit.attention(q, k[0], v, query=rotary)
    with pytest.raises(DtypeError, match=r"q has dtype torch.int64"):
        opkit.attention(q.long(), k.long(), v.long(), query=rotary)


def test_float8():
    q, k, v = (x.detach().float().to(torch.float8_e4m3fn) for x in inputs())
    with pytest.raises(DtypeError, match=r"would round their results to torch\.float8_e4m3fn"):
        opkit.attention(q, k, v, query=rotary)
    halved = opkit.attention(q, k, v, output=lambda x, b, h, i: x * 0.5)
    torch.testing.assert_close(halved, opkit.attention(q, k, v) * 0.5)


def test_parts_of_sequences(monkeypatch):
    monkeypatch.setattr("opkit.attn.api.context", object())
    with pytest.raises(ArgumentError, match="would number the rows of this process's part"):
        opkit.attention(*inputs(), query=rotary)
