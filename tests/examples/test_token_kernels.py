"""examples/kernels: gated units, rotary embedding, losses, routing, quantisation. In the interpreter, on a GPU, compiled."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import token_kernels as k
from row_kernels import check, tensors

from opkit.kernels.triton import binaries, compiling
from opkit.op.examples import calls as example_calls
from opkit.op.triton import building, launch
from opkit.op.triton.evaluation import evaluate
from opkit.op.triton.python import Values
from opkit.op.triton.variants import MACHINES, Variants

ARCHITECTURES = ["sm_80", "sm_90", "sm_100", "gfx942"]
DTYPE_IDS = [str(dtype).removeprefix("torch.") for dtype in k.DTYPES]
FLOAT8 = torch.float8_e4m3fn
by_dtype = pytest.mark.parametrize("dtype", k.DTYPES, ids=DTYPE_IDS)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def on(device: str, arguments: k.Given, **changes: Any) -> k.Given:
    """The arguments on a device; with ``dtype=``, floating ones in that."""
    dtype = changes.get("dtype")
    moved = [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments]
    return tuple(a.to(dtype) if dtype and isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in moved)


def exact(case: k.Case, arguments: k.Given) -> list[torch.Tensor]:
    """The operator's results in float64."""
    return tensors(case.op.reference(*on("cpu", arguments, dtype=torch.float64)))


def compare(results: Any, expected: list[torch.Tensor], bits: float) -> None:
    """Numbers as near as their dtype allows, integers and what is not a number alike."""
    for result, wide in zip(tensors(results), expected, strict=True):
        if result.is_floating_point() and not wide.isnan().any():
            check(result, wide, bits=bits)
        else:
            torch.testing.assert_close(result.cpu(), wide.to(result.dtype).cpu(), rtol=0, atol=0, equal_nan=True)


def compare_layer(results: Any, expected: list[torch.Tensor], dtype: torch.dtype) -> None:
    """What comes of logits that are rounded to ``dtype``, as near as these allow."""
    room = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 2e-5}[dtype]
    for result, wide in zip(results, expected, strict=True):
        torch.testing.assert_close(
            result.double().cpu(), wide, rtol=room, atol=room * max(wide.abs().max().item(), 0.01)
        )


# ---- numbers, in the interpreter -------------------------------------------------------------------------------------


@pytest.mark.sweep(keep=["swiglu", "geglu_backward", "rotary", "cross_entropy"])
@by_dtype
@pytest.mark.parametrize("name", k.CASES)
def test_numbers(interpreted, name, dtype):
    case = k.CASES[name]
    for shape in k.SHAPES[name]:
        arguments = case.arguments(shape, dtype)
        results, expected = interpreted(case.op, *arguments), exact(case, arguments)
        compare_layer(results, expected, dtype) if name.startswith("linear") else compare(results, expected, 4)


def test_halves_of_one_projection_are_read_where_they_lie(interpreted):
    gate, up = torch.randn(3, 5, 2 * 100).chunk(2, -1)
    for op, arguments in ((k.glu.swiglu, (gate, up)), (k.glu.geglu_backward, (gate.contiguous(), gate, up))):
        compare(interpreted(op, *arguments), exact(k.Case(op, k.gates(2)), arguments), 4)


def test_queries_may_lie_anyhow(interpreted):
    projected = torch.randn(2, 3, 8 * 16)
    q, keys = projected[..., : 4 * 16].view(2, 3, 4, 16), torch.randn(2, 2, 3, 16).transpose(1, 2)
    arguments = (q, keys, torch.rand(3, 16), torch.rand(3, 16))
    compare(interpreted(k.rotary.rotary, *arguments), exact(k.CASES["rotary"], arguments), 4)


@by_dtype
def test_of_equal_logits_the_first_expert_is_taken(interpreted, dtype):
    logits = torch.tensor([[0.5, -1.0, 0.5, -1.0, 0.5, -1.0, -1.0, -2.0], [-torch.inf] * 7 + [1.0]]).to(dtype)
    weights, index = interpreted(k.router.router, logits, 5, False)
    assert index.tolist() == [[0, 2, 4, 1, 3], [7, 0, 1, 2, 3]]
    assert weights[1].tolist() == [1, 0, 0, 0, 0]


def test_a_target_that_is_no_class_makes_the_loss_nan(interpreted):
    for target in (-1, 10, 2**31):
        targets = torch.tensor([1, target])
        assert interpreted(k.linear_cross_entropy.cross_entropy, torch.randn(2, 10), targets)[0].isnan()


def test_logits_of_minus_infinity(interpreted):
    logits = torch.randn(3, 9000)
    logits[0, :8999], logits[1, 1:], logits[2, ::2] = -torch.inf, -torch.inf, -torch.inf
    targets = torch.tensor([8999, 0, 1])
    arguments = (logits, targets, -100)
    compare(
        interpreted(k.linear_cross_entropy.cross_entropy, *arguments), exact(k.CASES["cross_entropy"], arguments), 4
    )


# ---- 8 bits: the same as torch, bit for bit --------------------------------------------------------------------------

ROWS = [(5, 37), (3, 64), (1, 1), (7,), (2, 3, 100), (0, 8), (300, 4), (2, 20000)]


def rows(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape) * torch.logspace(-3, 2, shape[-1]) * torch.randn((*shape[:-1], 1))).to(dtype)


@pytest.mark.sweep(4)
@by_dtype
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_quantised_rows(interpreted, shape, dtype):
    x = rows(shape, dtype)
    for op in (k.quantize.quantize_int8, k.quantize.quantize_fp8):
        (q, scales), (expected, expected_scales) = interpreted(op, x), op.reference(x)
        assert torch.equal(scales, expected_scales)
        assert torch.equal(q.view(torch.int8), expected.view(torch.int8))
        for out, room in ((torch.float32, 0.0), (torch.float16, 2**-10), (torch.bfloat16, 2**-7)):
            back, exact_back = (
                interpreted(k.quantize.dequantize, q, scales, out),
                q.double() * scales.double()[..., None],
            )
            torch.testing.assert_close(
                back.double(), exact_back, rtol=room + 1e-7, atol=2**-24 * (out == torch.float16)
            )


def test_every_number_of_float8(interpreted):
    numbers = torch.arange(256, dtype=torch.uint8).view(FLOAT8)[None]
    back = interpreted(k.quantize.dequantize, numbers, torch.ones(1), torch.float32)
    torch.testing.assert_close(back, numbers.float(), rtol=0, atol=0, equal_nan=True)


def test_rounding_to_float8_between_its_numbers(interpreted):
    numbers = torch.arange(127, dtype=torch.uint8).view(FLOAT8).float()
    between = torch.cat([(numbers[1:] + numbers[:-1]) / 2 * side for side in (1 - 2**-20, 1.0, 1 + 2**-20)])
    x = torch.cat([between, -between, torch.tensor([448.0])])[None]
    q, _ = interpreted(k.quantize.quantize_fp8, x)
    assert torch.equal(q.view(torch.uint8), x.to(FLOAT8).view(torch.uint8))


def test_rows_of_zeros(interpreted):
    for op in (k.quantize.quantize_int8, k.quantize.quantize_fp8):
        q, scales = interpreted(op, torch.zeros(2, 10))
        assert not q.float().any()
        assert scales.gt(0).all()


# ---- gradients -------------------------------------------------------------------------------------------------------

GRADIENTS = {
    "swiglu": ((5, 96), 2),
    "geglu": ((2, 10, 33), 2),
    "rotary": ((2, 3, 4, 16), 2),
    "cross_entropy": ((6, 70), 1),
    "linear_cross_entropy": ((5, 16), 2),
    **{name: ((6, 40), 1) for name in k.CASES if name.startswith("router ")},
}


def leaves(arguments: k.Given, count: int, dtype: torch.dtype, device: str = "cpu") -> k.Given:
    """The arguments, of which the first ``count`` ask for their gradients, in ``dtype``."""
    given = on(device, arguments, dtype=dtype)
    return (*[a.detach().clone().requires_grad_() for a in given[:count]], *given[count:])


def exact_gradients(case: k.Case, arguments: k.Given, count: int, cotangents: list[torch.Tensor]) -> Any:
    given = leaves(arguments, count, torch.float64)
    outputs = [out for out in tensors(case.op.reference(*given)) if out.requires_grad][: len(cotangents)]
    return torch.autograd.grad(outputs, given[:count], [c.double().cpu() for c in cotangents])


def cotangents_of(name: str, case: k.Case, arguments: k.Given, dtype: torch.dtype) -> list[torch.Tensor]:
    results = tensors(case.op.reference(*arguments))
    wanted = results[:2] if name == "rotary" else results[:1]
    return [torch.randn(out.shape).to(out.dtype if "cross" in name else dtype) for out in wanted]


@pytest.mark.sweep(6)
@by_dtype
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(interpreted, name, dtype):
    case, (shape, count) = k.CASES[name], GRADIENTS[name]
    arguments = case.arguments(shape, dtype)
    cotangents = cotangents_of(name, case, arguments, dtype)
    _, gradients = interpreted.differentiate(case.op, cotangents, *leaves(arguments, count, dtype))
    expected = exact_gradients(case, arguments, count, cotangents)
    compare_layer(gradients, expected, dtype)


def test_gradients_of_gradients():
    given = tuple(torch.randn(2, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for op in (k.glu.swiglu, k.glu.geglu):
        assert torch.autograd.gradcheck(op, given)
        assert torch.autograd.gradgradcheck(op, given)


def test_angles_are_constants():
    q, keys, cos, sin = k.heads((1, 2, 2, 4), torch.float32)
    with pytest.raises(NotImplementedError, match="detach"):
        k.rotary.rotary(q, keys, cos.requires_grad_(), sin)[0].sum().backward()


def test_only_the_gradients_that_are_asked_for():
    hidden, weight, targets, *_ = k.layer((5, 16), torch.float32)
    loss = k.linear_cross_entropy.linear_cross_entropy
    (gradient,) = torch.autograd.grad(loss(hidden.requires_grad_(), weight, targets), hidden)
    assert gradient.shape == hidden.shape
    assert not loss(hidden.detach(), weight, targets).requires_grad
    with torch.no_grad():
        assert not loss(hidden, weight, targets).requires_grad


# ---- code for architectures that are not there -----------------------------------------------------------------------


def bounds() -> dict[str, tuple[Any, Any]]:
    """Every kernel of the operators, with its operator."""
    ops = [op for module in k.MODULES for op in vars(module).values() if hasattr(op, "register_kernel")]
    kernels = [(op, kernel) for op in dict.fromkeys(ops) for kernel in op._operator.kernels.kernels]
    return {
        f"{op.name} {kernel.name}": (op, kernel.function) for op, kernel in kernels if hasattr(kernel.function, "bound")
    }


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("dtype", "targets"), [("bf16", ARCHITECTURES), ("fp32", ["sm_90"])], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", bounds())
def test_compiles_without_spills(name, dtype, targets):
    op, function = bounds()[name]
    kernel, example = function.bound.kernel, function.bound.kernel.examples[0]
    given = {
        key: value.replace("bf16[", f"{dtype}[") if isinstance(value, str) else value for key, value in example.items()
    }
    (call,) = example_calls.from_examples(op._operator, [given])
    for target in [target for target in targets if target in (kernel.targets or ARCHITECTURES)]:
        request = building.request_for(
            building.values_of(op._operator, function.bound, call), next(iter(kernel.configs), None), target
        )
        assert binaries.resources_of(compiling.build(request)).spills == 0, target


def by_hand(n: int, classes: int, **others: Any) -> dict[str, dict[str, Any]]:
    """What the kernels are given that a Python kernel launches."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    common = {"targets": empty(n, dtype=torch.int64), "losses": empty(n), "ignore_index": -100}
    rows = {**common, "logits": empty(n, classes, dtype=torch.bfloat16)}
    return {
        "LOSSES": {**rows, "lse": empty(n)},
        "MEAN": {**common, "loss": empty(), "count": empty()},
        "LOSSES_AND_GRADIENTS": {**rows, "count": empty(), "GRADIENTS": True},
    }


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ARCHITECTURES)
@pytest.mark.parametrize("name", by_hand(1, 1))
def test_what_is_launched_by_hand_compiles_without_spills(name, target):
    given = by_hand(8192, 32000)[name]
    kinds = {key: launch._kind(getattr(k.linear_cross_entropy, name), key, value) for key, value in given.items()}
    bound = launch.LaunchForm(getattr(k.linear_cross_entropy, name), kinds).bound
    values = Values(bound, list(given.values()), ())
    named = evaluate(bound.where, bound.formulas, {**values.named(), **bound.constants})
    seen = [building._seen(values.of(source)) for source in bound.sources]
    found = binaries.resources_of(compiling.build(Variants(bound, MACHINES["cuda"]).request(seen, named, target)))
    assert found.spills == 0
    assert found.threads <= 1024


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_number_of_experts_has_configs(dtype):
    logits = type("Info", (), {"dtype": dtype})
    for experts in (1, 8, 60, 64, 128, 160, 256):
        assert 1 <= len(k.router._fitting(k.router.FORWARD, logits, experts)) <= 6, experts


# ---- as scripts, and on a GPU ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", k.MODULES, ids=lambda module: module.__name__)
def test_the_example_runs(module):
    module.main()


@pytest.mark.sweep
@pytest.mark.gpu
@by_dtype
@pytest.mark.parametrize("name", k.CASES)
def test_numbers_on_a_gpu(name, dtype):
    case = k.CASES[name]
    for shape in k.LARGE[name]:
        arguments = case.arguments(shape, dtype)
        given = on("cuda", arguments)
        assert case.op.select(*given).kernel != "reference"
        results, expected = case.op(*given), exact(case, arguments)
        compare_layer(results, expected, dtype) if name.startswith("linear") else compare(results, expected, 8)


@pytest.mark.sweep
@pytest.mark.gpu
@by_dtype
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_on_a_gpu(name, dtype):
    case, (shape, count) = k.CASES[name], GRADIENTS[name]
    arguments = case.arguments((50, *shape[1:]), dtype)
    cotangents = [c.cuda() for c in cotangents_of(name, case, arguments, dtype)]
    given = leaves(arguments, count, dtype, "cuda")
    outputs = [out for out in tensors(case.op(*given)) if out.requires_grad]
    gradients = torch.autograd.grad(outputs, given[:count], cotangents)
    compare_layer(gradients, exact_gradients(case, arguments, count, cotangents), dtype)


@pytest.mark.gpu
@by_dtype
def test_quantised_rows_on_a_gpu(dtype):
    for shape in [(4096, 4096), (1000, 14336), (100000, 128), (3, 20000), *ROWS]:
        x = rows(shape, dtype).cuda()
        for op in (k.quantize.quantize_int8, k.quantize.quantize_fp8):
            assert op.select(x).kernel != "reference"
            (q, scales), (expected, expected_scales) = op(x), op.reference(x)
            assert torch.equal(scales, expected_scales)
            assert torch.equal(q.view(torch.int8), expected.view(torch.int8))
            for out in k.DTYPES:
                back = k.quantize.dequantize(q, scales, out)
                torch.testing.assert_close(back, k.quantize.dequantize.reference(q, scales, out), rtol=1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["on_bits", "in_hardware"])
def test_both_ways_to_float8_on_a_gpu(kernel):
    import opkit

    x = rows((1000, 4096), torch.float32).cuda()
    with opkit.use_kernel(k.quantize.quantize_fp8, kernel):
        q, scales = k.quantize.quantize_fp8(x)
    assert torch.equal(q.view(torch.uint8), k.quantize.quantize_fp8.reference(x)[0].view(torch.uint8))
    with opkit.use_kernel(k.quantize.dequantize, f"fp8_{kernel}"):
        back = k.quantize.dequantize(q, scales, torch.float32)
    torch.testing.assert_close(back, k.quantize.dequantize.reference(q, scales, torch.float32))


@pytest.mark.gpu
def test_several_chunks_on_a_gpu(monkeypatch):
    monkeypatch.setattr(k.linear_cross_entropy, "CHUNK_BYTES", 2**20)
    case, arguments = k.CASES["linear_cross_entropy"], k.layer((1000, 128), torch.float32)
    compare_layer(case.op(*on("cuda", arguments)), exact(case, arguments), torch.float32)


@pytest.mark.gpu
def test_views_on_a_gpu():
    gate, up = torch.randn(30, 50, 2 * 1000, device="cuda").chunk(2, -1)
    torch.testing.assert_close(k.glu.swiglu(gate, up), k.glu.swiglu.reference(gate, up))
    q, keys = (torch.randn(2, heads, 60, 64, device="cuda").transpose(1, 2) for heads in (8, 2))
    cos, sin = (angle.cuda() for angle in k.rotary.angles(60, 64))
    for result, expected in zip(
        k.rotary.rotary(q, keys, cos, sin), k.rotary.rotary.reference(q, keys, cos, sin), strict=True
    ):
        torch.testing.assert_close(result, expected)
