"""Users' functions as masks and biases: what they compute, their gradients, what of them known opcodes express, and mistakes."""

import functools
import itertools
import types

import pytest
import torch
import torch.nn.functional as F

import opkit
from opkit.attn.api import lowered
from opkit.attn.functions import captures
from opkit.attn.functions.ranges import truth
from opkit.attn.functions.trace import trace
from opkit.attn.masks import program
from opkit.errors import ArgumentError, ArgumentTypeError, DtypeError, ShapeError
from opkit.masks import Causal, MaskFunction, SlidingWindow
from opkit.nn.functional import flex_attention

B, H, S, D = 2, 4, 50, 16
SLOPES = torch.linspace(0.1, 0.9, H, dtype=torch.float64)
IDS = torch.arange(S + 9).div(17, rounding_mode="floor").expand(B, -1).contiguous()  # more than there are keys
LENGTHS = torch.tensor([30, 50])
TABLE = torch.linspace(-1, 1, H * (2 * S - 1), dtype=torch.float64).reshape(H, -1).sin()
FULL = torch.linspace(-9, 9, B * H * S * S, dtype=torch.float64).reshape(B, H, S, S).cos()
WINDOW = 7


def near(width, step):
    return lambda b, h, i, j: (i >= j) & (i - j < width) & ((i - j) % step == 0)


MASKS = {
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i >= j) & (i - j < WINDOW),
    "symmetric window": lambda b, h, i, j: (j - i).abs() <= WINDOW,
    "packed sequences": lambda b, h, i, j: (IDS[b, i] == IDS[b, j]) & (i >= j),
    "prefix": lambda b, h, i, j: (j < LENGTHS[b]) | (i >= j),
    "dilated": near(20, 3),
    "neighbourhood": lambda b, h, i, j: ((i // 8 - j // 8).abs() <= 1) & ((i % 8 - j % 8).abs() <= 2),
    "by head": lambda b, h, i, j: torch.where(h < 2, i >= j, i <= j),
    "a tensor of bools": lambda b, h, i, j: (FULL > 0)[b, h, i, j],
    "not the diagonal": lambda b, h, i, j: (i != j) & (j < 40),
    "rows that see nothing": lambda b, h, i, j: (i > 5) & (j * 2 < i),
}
SCORES = {
    "none": lambda s, b, h, i, j: s,
    "alibi": lambda s, b, h, i, j: s + SLOPES[h] * (j - i),
    "soft cap": lambda s, b, h, i, j: 20 * torch.tanh(s / 20),
    "relative": lambda s, b, h, i, j: s + TABLE[h, j - i + S - 1],
    "clamped": lambda s, b, h, i, j: s + TABLE[h, (j - i).clamp(-9, 9) + 9].exp(),
    "a tensor": lambda s, b, h, i, j: s + FULL[b, h, i, j] - SLOPES[h].exp(),
    "hidden": lambda s, b, h, i, j: torch.where(i >= j, s * SLOPES[h], -float("inf")),
    "product": lambda s, b, h, i, j: s * torch.sigmoid(s) + SLOPES[h] ** 2,
    "infinite exponentials": lambda s, b, h, i, j: (F.silu(2000 * s) + F.softplus(2000 * s)) / 2000,
}


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, S, D, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]


def formula(q, k, v, mask=None, score=None):
    """Attention with the functions evaluated on the whole grid, in torch operations."""
    b, h, i, j = (torch.arange(n).reshape(-1, *[1] * k) for n, k in ((B, 3), (H, 2), (S, 1), (S, 0)))
    logits = q @ k.mT * D**-0.5
    logits = logits if score is None else score(logits, b, h, i, j)
    if mask is not None:
        logits = logits.masked_fill(~mask(b, h, i, j).expand_as(logits), -torch.inf)
    return logits.softmax(-1).nan_to_num() @ v


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    check_formula(mask=MASKS[name])


@pytest.mark.parametrize("name", SCORES)
def test_scores(name):
    check_formula(score=SCORES[name])


def test_a_mask_and_a_score_together():
    check_formula(mask=MASKS["dilated"], score=SCORES["clamped"])


def check_formula(mask=None, score=None):
    q, k, v = inputs()
    captured = [x.requires_grad_(score is not None) for x in (SLOPES, TABLE, FULL)]
    out, expected = opkit.attention(q, k, v, mask=mask, bias=score), formula(q, k, v, mask, score)
    torch.testing.assert_close(out, expected)
    wanted = [q, k, v, *(captured if score is not None else [])]
    gradient = torch.randn_like(out)
    found, right = (torch.autograd.grad(x, wanted, gradient, materialize_grads=True) for x in (out, expected))
    torch.testing.assert_close(found, right)


def test_second_derivatives():
    q, k, v = (x[:1, :2, :6, :4].detach().clone().requires_grad_() for x in inputs())
    slopes = SLOPES[:2].detach().clone().requires_grad_()

    def attention(q, k, slopes):
        return opkit.attention(q, k, v.detach(), bias=lambda s, b, h, i, j: s * slopes[h] + slopes[h] ** 2 * (i - j))

    assert torch.autograd.gradgradcheck(attention, (q, k, slopes))


def opcodes(mask=None, score=None):
    call = lowered(*inputs(torch.float32), mask, score, None, None, None, 0.0, "bhsd")
    words = [each[0] for each in program.instructions(call[7], program.MASK_OPERANDS)]
    return words, [each[0] for each in program.instructions(call[8], program.BIAS_OPERANDS)], call[10]


def test_what_known_opcodes_express():
    band, function = program.BAND, program.FUNCTION
    expected = {
        "causal": [band],
        "window": [band, band, program.AND],
        "symmetric window": [band],
        "packed sequences": [program.SEGMENTS, band, program.AND],
        "prefix": [program.LENGTH, band, program.OR],
        "dilated": [band, band, program.AND, function, program.AND],
        "neighbourhood": [function],
        "not the diagonal": [band, program.NOT, function, program.AND],
    }
    assert {name: opcodes(mask=MASKS[name])[0] for name in expected} == expected
    assert opcodes(score=SCORES["soft cap"]) == ([], [], 20.0)
    assert opcodes(score=SCORES["a tensor"])[1] == [program.BIAS_DENSE, program.BIAS_FUNCTION]
    assert opcodes(score=SCORES["hidden"])[:2] == ([band], [program.BIAS_FUNCTION])


class Settings:
    """What functions read; ``half`` is computed, ``step`` is of the class."""

    step = 3

    def __init__(self):
        self.width, self.inner, self.ids = 4, types.SimpleNamespace(scale=0.5), torch.arange(S) // 3

    @property
    def half(self):
        return self.width // 2

    def mask(self, b, h, i, j):
        return ((i - j).abs() < self.width) | ((i + j) % self.step == 0)


COUNT = torch.tensor(2)


def test_attributes_that_change_between_calls():
    own, module = Settings(), types.ModuleType("settings")
    module.near = lambda i, j: (i - j).abs() <= 1
    masks = (
        lambda b, h, i, j: ((i - j).abs() < own.width) | (own.ids[i] == own.ids[j]),
        lambda b, h, i, j: (i - j).abs() < own.half + 1,
        lambda b, h, i, j: module.near(i, j) | (i - j == own.step),
        lambda b, h, i, j: (i - j).abs() < functools.reduce(max, [own.width, 2]),
        lambda b, h, i, j: (i - j).abs() < COUNT.item(),
        own.mask,
    )
    score = lambda s, b, h, i, j: s * own.inner.scale  # noqa: E731
    q, k, v = inputs()

    def check():
        for mask in masks:
            torch.testing.assert_close(opkit.attention(q, k, v, mask=mask, bias=score), formula(q, k, v, mask, score))

    check()
    own.width = 2
    check()
    own.ids = own.ids.int() // 2
    check()
    own.ids[:] = 0
    own.inner.scale = 2.0
    COUNT.fill_(1)
    check()
    own.step = 2
    module.near = lambda i, j: (i - j).abs() <= 3
    check()


def test_a_key_at_the_end_of_a_length():
    q, k, v = inputs()
    ends = torch.tensor([3, 7], dtype=torch.int32)[: q.shape[0]]
    for mask in (lambda b, h, i, j: (j == ends[b]) | (i < j), lambda b, h, i, j: (j != ends[b]) & (i >= j)):
        torch.testing.assert_close(opkit.attention(q, k, v, mask=mask), formula(q, k, v, mask))


def test_captured_integers_that_torch_wraps_around():
    q, k, v = inputs()

    def masks(number):
        return (
            lambda b, h, i, j: (i * j) % 7 < number,
            lambda b, h, i, j: (i.long() * j) % 7 < number,
            lambda b, h, i, j: i - j < number,
        )

    narrow, wide, band = masks(2**32 + 3)
    with pytest.raises(ArgumentError, match=r"4294967299, and computes with it in i32.*q_idx.long\(\)"):
        opkit.attention(q, k, v, mask=narrow)
    for mask in (masks(3)[0], wide, band):
        torch.testing.assert_close(opkit.attention(q, k, v, mask=mask), formula(q, k, v, mask))


def test_one_batch_of_ids():
    q, ids = torch.randn(1, H, S, D), IDS[:1]
    mask = lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (i >= j)  # noqa: E731
    words = lowered(q, q, q, mask, None, None, None, None, 0.0, "bhsd")[7]
    assert words[0] == program.SEGMENTS
    torch.testing.assert_close(opkit.attention(q, q, q, mask=mask), opkit.attention(q, q, q, mask=MaskFunction(mask)))


def test_a_band_of_the_same_numbers_as_the_mask_that_says_the_same():
    q = inputs(torch.float32)[0]
    for mask, same in ((MASKS["causal"], Causal()), (MASKS["symmetric window"], SlidingWindow(WINDOW, WINDOW))):
        first, second = (lowered(q, q, q, each, None, None, None, None, 0.0, "bhsd")[7] for each in (mask, same))
        assert first == second


def test_functions_combine_with_masks():
    q, k, v = inputs()
    odd = MaskFunction(lambda b, h, i, j: (i + j) % 2 == 1)
    found = opkit.attention(q, k, v, mask=Causal() & ~odd | MASKS["symmetric window"])
    expected = formula(q, k, v, lambda b, h, i, j: (i >= j) & ((i + j) % 2 == 0) | ((i - j).abs() <= WINDOW))
    torch.testing.assert_close(found, expected)


def test_captured_numbers_are_no_part_of_the_expression():
    def text(mask):
        call = lowered(*inputs(torch.float32), mask, None, None, None, None, 0.0, "bhsd")
        steps = program.instructions(call[7], program.MASK_OPERANDS)
        ((_, *operands),) = [each for each in steps if each[0] == program.FUNCTION]
        return operands

    first, second = text(near(20, 3)), text(near(9, 4))
    assert len(first) == len(second)
    assert sum(a != b for a, b in zip(first, second, strict=True)) == 2
    q, k, v = inputs()
    for numbers in ((20, 3), (9, 4)):
        mask = near(*numbers)
        torch.testing.assert_close(opkit.attention(q, k, v, mask=mask), formula(q, k, v, mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_function_that_needs_a_captured_number(dtype):
    def steps(count):
        return lambda b, h, i, j: functools.reduce(torch.logical_or, [i - j == 2**n for n in range(count)])

    q, k, v = inputs()
    for count in (3, 5, 3, 4):
        if count == 4:
            captures.learned.cache_clear()  # as many other functions do
        found = opkit.attention(*(x.to(dtype) for x in (q, k, v)), mask=steps(count))
        bound = {"rtol": 0, "atol": 1e-5} if dtype == torch.float32 else {}
        torch.testing.assert_close(found.double(), formula(q, k, v, steps(count)), msg=str(count), **bound)


class Windowed(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.table = torch.nn.Parameter(torch.zeros(H, dtype=torch.float64))

    def forward(self, q):
        def score(s, b, h, i, j):
            return torch.where((i - j).abs() < self.width, s + self.table[h], -torch.inf)

        return opkit.attention(q, q, q, bias=score)


def test_attributes_of_captured_objects_may_change():
    q, module = inputs()[0], Windowed(3)
    for width in (3, 9):
        module.width = width
        expected = formula(q, q, q, lambda b, h, i, j, width=width: (i - j).abs() < width)
        torch.testing.assert_close(module(q), expected)
    module(q).square().sum().backward()
    assert module.table.grad is not None


def test_modules_within_functions():
    q, distances = inputs()[0], torch.nn.Embedding(2 * S, 1, dtype=torch.float64)

    def score(s, b, h, i, j):
        return s + distances(i - j + S).squeeze(-1)

    for _ in range(2):
        expected = formula(q, q, q, score=lambda s, b, h, i, j: s + distances.weight[i - j + S, 0])
        torch.testing.assert_close(opkit.attention(q, q, q, bias=score), expected)
        distances.weight = torch.nn.Parameter(torch.linspace(-1, 1, 2 * S, dtype=torch.float64)[:, None])


def test_other_numbers_of_queries_and_keys():
    q, k, v = inputs()
    mask = MASKS["neighbourhood"]
    torch.testing.assert_close(opkit.attention(q[:, :, :20], k, v, mask=mask), formula(q, k, v, mask)[:, :, :20])
    assert opkit.attention(q, k[:, :, :0], v[:, :, :0], mask=mask).abs().sum() == 0


def test_flex_attention_takes_functions():
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = (x.detach() for x in inputs())
    mask, score = MASKS["packed sequences"], SCORES["alibi"]
    expected = formula(q, k, v, mask, score)
    made = create_block_mask(mask, B, None, S, S, device="cpu", BLOCK_SIZE=16)
    for block_mask in (mask, made):
        torch.testing.assert_close(flex_attention(q, k, v, score_mod=score, block_mask=block_mask), expected)


def test_what_is_the_same_for_ranges_of_positions():
    """What intervals decide is so; blocks that they cannot decide are few where a function is made of comparisons."""
    masks = {
        **{
            name: MASKS[name] for name in ("window", "symmetric window", "neighbourhood", "by head", "not the diagonal")
        },
        "chunks": lambda b, h, i, j: (i // 16 == j // 16) ^ (j * 3 - i > 90),
        "remainders": lambda b, h, i, j: ((i % 32 - j % 32).abs() >= 20) | ~(torch.minimum(i, 50 - j) > -5),
        "choices": lambda b, h, i, j: torch.where(i < 24, -i + j > 8, torch.maximum(i, j) != WINDOW) & (h >= b),
        "tensors": lambda b, h, i, j: (IDS[b, i] == IDS[b, j]) & (i > j),
    }
    decided = dict.fromkeys(masks, 0)
    grid = [torch.arange(n).reshape(-1, *[1] * k) for n, k in ((B, 3), (H, 2), (S, 1), (S, 0))]
    for name, mask in masks.items():
        traced, whole = trace(mask, "mask", torch.float32, torch.device("cpu")), mask(*grid).expand(B, H, S, S)
        for first, begin in itertools.product(range(0, S, 8), repeat=2):
            rows, keys = range(first, min(first + 8, S)), range(begin, min(begin + 8, S))
            seen, found = whole[..., rows, :][..., keys], truth(traced, {"i": rows, "j": keys})
            assert found is None or (seen == found).all(), (name, rows, keys)
            decided[name] += found is not None
    assert decided["window"] > 30
    assert decided["chunks"] > 30
    assert decided["tensors"] == 21  # where no query is after a key


# ---- transforms and compilers ----------------------------------------------------------------------------------------


def model(q, k, v, slopes, width, factor=1.0):
    def score(s, b, h, i, j):
        return s * torch.sigmoid(slopes[h]) + slopes[h] * (j - i) * factor

    def mask(b, h, i, j):
        return ((i - j).abs() < width) & (IDS[b, i] == IDS[b, j]) | ((i + j) % 3 == 0)

    return opkit.attention(2 * factor * q, k, v, mask=mask, bias=score).sin()


def model_inputs(sequence=S, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(B, H, sequence, D, generator=generator).requires_grad_() for _ in range(3)
    ], SLOPES.detach().float()


@pytest.mark.parametrize("backend", ["opkit", pytest.param("aot_eager", marks=pytest.mark.exhaustive)])
def test_compiled_once_for_all_sizes_and_numbers(backend):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    frames = 0
    for sequence, width, factor in ((S, 7, 0.5), (S, 9, 0.5), (40, 9, 0.7), (33, 5, -0.3)):
        tensors, slopes = model_inputs(sequence)
        wanted = [*tensors, slopes.requires_grad_()]
        out, expected = (f(*tensors, slopes, width, factor) for f in (compiled, model))
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        gradient = torch.randn_like(out)
        found, right = (torch.autograd.grad(x, wanted, gradient) for x in (out, expected))
        torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-4)
        assert frames in (0, counter.frame_count)
        frames = counter.frame_count


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("opkit", marks=pytest.mark.exhaustive)])
def test_compiled_with_views_of_one_tensor(backend):
    """Queries, keys, values and what functions capture are often views of one product, as with fused projections."""

    def attend(fused):
        q, k, v, captured = fused.unbind()
        return opkit.attention(q, k, v, bias=lambda s, b, h, i, j: s + captured[b, h, i, j % 4] + captured[b, h, j, 5])

    fused = torch.randn(4, 2, 2, 40, 16, requires_grad=True)
    out, expected = (f(fused) for f in (torch.compile(attend, backend=backend, fullgraph=True), attend))
    torch.testing.assert_close(out, expected)
    found, right = (torch.autograd.grad(x.square().sum(), fused)[0] for x in (out, expected))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


class Model(torch.nn.Module):
    def forward(self, q, k, v, slopes):
        return model(q, k, v, slopes, 7)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    tensors, slopes = model_inputs()
    tensors = [x.detach() for x in tensors]
    sequence = torch.export.Dim("sequence", min=4, max=S)
    shapes = ({2: sequence}, {2: sequence}, {2: sequence}, None)
    program = torch.export.export(Model(), (*tensors, slopes), dynamic_shapes=shapes, strict=strict)
    shorter = [x[:, :, :20] for x in tensors]
    for given in (tensors, shorter):
        torch.testing.assert_close(program.module()(*given, slopes), model(*given, slopes, 7))


def test_vmap_and_func_grad():
    (q, k, v), slopes = model_inputs()
    q, k, v, many = q.detach(), k.detach(), v.detach(), torch.stack([slopes, -slopes, slopes * 2])
    several = torch.stack([q, -q, q * 2])
    each = [model(x, k, v, y, 7) for x, y in zip(several, many, strict=True)]
    found = torch.func.vmap(lambda x, y: model(x, k, v, y, 7))(several, many)
    torch.testing.assert_close(found, torch.stack(each))
    found = torch.func.vmap(lambda x: model(x, k, v, slopes, 7))(several)
    torch.testing.assert_close(found[2], model(several[2], k, v, slopes, 7))
    gradient = torch.func.grad(lambda y: model(q, k, v, y, 7).square().sum())(slopes)
    own = slopes.clone().requires_grad_()
    model(q, k, v, own, 7).square().sum().backward()
    torch.testing.assert_close(gradient, own.grad)


# ---- mistakes --------------------------------------------------------------------------------------------------------


def _branches(b, h, i, j):
    if i > j:
        return i == j
    return i != j


def _writes(b, h, i, j):
    i += 1
    return i > j


META, META_BOOLS = torch.zeros(S, device="meta"), torch.zeros(S, dtype=torch.bool, device="meta")
MISTAKES = [
    (ArgumentError, r"_branches \(.*test_functions.py:\d+\) branches on a value.*: if i > j:", {"mask": _branches}),
    (ArgumentError, r"_writes .* writes to a tensor: .*: i \+= 1", {"mask": _writes}),
    (DtypeError, "returned torch.int32, a mask_mod returns torch.bool", {"mask": lambda b, h, i, j: i - j}),
    (DtypeError, "returned torch.int32, a score_mod returns", {"bias": lambda s, b, h, i, j: i - j}),
    (ShapeError, r"returned shape \(1, 59\) for one query and key", {"mask": lambda b, h, i, j: IDS[b] == i}),
    (ArgumentTypeError, "returned NoneType, expected a tensor", {"mask": lambda b, h, i, j: None}),
    (ArgumentTypeError, r"called as mask_mod\(b, h, q_idx, kv_idx\)", {"mask": lambda s, b, h, i, j: i >= j}),
    (ArgumentTypeError, "does not compute one element", {"mask": lambda b, h, i, j: LENGTHS.cumsum(0)[b] > j}),
    (ArgumentTypeError, "raised ZeroDivisionError: .*: 1 // 0", {"mask": lambda b, h, i, j: j < (1 // 0)}),
    (ArgumentError, r"on meta, q is on cpu: at .*: .*s \+ META", {"bias": lambda s, b, h, i, j: s + META[i]}),
    (ArgumentError, r"test_functions.py:\d+\) captures a tensor .* on meta, q is on cpu\. Move it",
     {"mask": lambda b, h, i, j: META.bool()[j]}),
    (ArgumentError, r"test_functions.py:\d+\) captures a tensor .* on meta, q is on cpu\. Move it",
     {"mask": lambda b, h, i, j: META_BOOLS[j]}),
    (ShapeError, r"dimension 0 of a tensor of shape \(2,\) by the numbers of heads, of which there are 4",
     {"bias": lambda s, b, h, i, j: s + LENGTHS[h]}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_mistakes_are_explained(number):
    error, match, wrong = MISTAKES[number]
    q, k, v = inputs(torch.float32)
    with pytest.raises(error, match=match):
        opkit.attention(q, k, v, **wrong)


def test_recent_calls_with_other_captures():
    own = types.SimpleNamespace(step=2)

    def functions(width, scale):
        return (
            lambda b, h, i, j: ((i - j).abs() < width) | ((i + j) % own.step == 0),
            lambda s, b, h, i, j: s * scale,
        )

    numbers = ((3, 1.0, 2), (3, 1, 2), (5, 0.5, 3), (3, 1.0, 2), (True, 1.0, 4), (5, 0.5, 3))
    for dtype in (torch.float64, torch.float32):
        q, k, v = (x.detach().to(dtype) for x in inputs())
        for width, scale, own.step in numbers:
            mask, score = functions(width, scale)
            for _ in range(3):
                out = opkit.attention(q, k, v, mask=mask, bias=score)
                torch.testing.assert_close(out, formula(q, k, v, mask, score), rtol=1e-4, atol=1e-5)
