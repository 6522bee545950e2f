"""numbers: planted defects that each property must catch, right operators that it must pass."""

import pytest
import torch
from hypothesis import strategies as st

import opkit
from opkit.testing import tensor

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ROWS = tensor("b d", _FLOATS)


def _doubled(x):
    return x * 2


def _summed_in(dtype):
    def op(x):
        total = torch.zeros(x.shape[:-1], dtype=dtype)
        for i in range(x.shape[-1]):
            total = total + x[..., i].to(dtype)
        return total.to(x.dtype)

    return op


def _last_sum(x):
    return x.sum(-1)


def _wrong_where(condition):
    return lambda x: x * 2 + 1 if condition(x) else x * 2


def test_a_wrong_tail_shrinks_to_its_first_size(fails):
    def wrong(x):
        return torch.where(torch.arange(x.numel()).view(x.shape) >= 64, x + 1, x)

    failure = fails("numbers.reference", wrong, args=(tensor("b n"),), reference=lambda x: x.clone())
    assert failure.args[0].shape == (1, 65)


@pytest.mark.parametrize(
    ("condition", "shape", "dtype"),
    [
        (lambda x: x.shape[1] > 1000 and x.shape[1] % 2, (1, 1001), torch.float32),
        (lambda x: x.shape[0] == x.shape[1] > 1, (2, 2), torch.float32),
        (lambda x: x.shape[1] == 1 < x.shape[0], (2, 1), torch.float32),
        (lambda x: x.dtype == torch.float16, (1, 1), torch.float16),
        (lambda x: x.dtype == torch.bfloat16 and x.shape[1] > 512, (1, 513), torch.bfloat16),
    ],
)
def test_rare_sizes_and_dtypes_are_met(fails, condition, shape, dtype):
    found = fails("numbers.reference", _wrong_where(condition), args=(_ROWS,), reference=_doubled).args[0]
    assert found.dtype == dtype
    assert found.dim() == 2
    assert found.shape[0] == shape[0]
    assert shape[1] <= found.shape[1] <= max(shape[1] + 30, 3) or found.shape == (3, 3)


def test_a_second_batch_dimension_is_met(fails):
    wrong = _wrong_where(lambda x: x.dim() > 2 and x.shape[1] > 1)
    failure = fails("numbers.reference", wrong, args=(tensor("*b d"),), reference=_doubled)
    assert failure.args[0].shape == (1, 2, 1)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_accumulator_is_found(fails, dtype):
    fails("numbers.reference", _summed_in(dtype), args=(tensor("d", dtype),), reference=_last_sum)


def test_a_float32_accumulator_passes_but_for_float64(fails, holds):
    narrow = tensor("b d", (torch.float32, torch.bfloat16, torch.float16))
    holds("numbers.reference", _summed_in(torch.float32), args=(narrow,), reference=_last_sum, max_examples=20)
    wide = tensor("b d", torch.float64)
    fails("numbers.reference", lambda x: x.float().sum(-1).double(), args=(wide,), reference=_last_sum)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (lambda x: (x.bfloat16() * 2).float(), _doubled),
        (lambda x: (x * x).mean(-1) - x.mean(-1) ** 2, lambda x: x.var(-1, unbiased=False)),
        (lambda x: (x.abs() + 0.5).floor() * x.sign(), torch.round),
        (lambda x: (x > 0.5).to(x.dtype), lambda x: (x >= 0.5).to(x.dtype)),
        (
            lambda x: torch.layer_norm(x, x.shape[-1:], eps=0.0),
            lambda x: torch.layer_norm(x, x.shape[-1:], eps=1e-5),
        ),
        (lambda x: (x, x), lambda x: x.clone()),
        (lambda x: x.abs().rsqrt() * (1 + 3e-4), lambda x: x.abs().rsqrt()),
    ],
)
def test_wrong_numbers_are_found(fails, wrong, right):
    fails("numbers.reference", wrong, args=(tensor("b d"),), reference=right)


def test_a_missing_write_is_found(fails):
    both = (tensor("n"), tensor("n"))
    failure = fails("numbers.reference", torch.add, args=both, reference=lambda a, b: a.add_(b))
    assert "argument tensor 0" in failure.message


@pytest.mark.parametrize(
    ("op", "reference", "args"),
    [
        (torch.add, torch.add, (tensor("b n"), tensor("n"))),
        (lambda x: x.sort(stable=True), torch.sort, (_ROWS,)),
        (
            lambda x: torch.round(x * 10).to(torch.int8),
            lambda x: torch.round(x / 0.1).to(torch.int8),
            (tensor("n", fills=("normal",)),),
        ),
        (lambda a, b: (a[:, :, None] * b).sum(1), torch.matmul, (tensor("m k"), tensor("k n"))),
        (
            lambda i, w: w[i],
            lambda i, w: w.index_select(0, i),
            (tensor("k", torch.int64, low=0, high="n-1"), tensor("n d")),
        ),
    ],
)
def test_right_operators_hold(holds, op, reference, args):
    holds("numbers.reference", op, args=args, reference=reference)


def test_what_no_number_may_index_is_not_asked(holds):
    """The bounds leave no index into a tensor of no rows: the operator is not called with one."""

    def rows(x, index):
        assert x.shape[0] or not index.numel()
        return x[index]

    args = (tensor("n d"), tensor("k", torch.int64, low=0, high="n-1"))
    assert holds("numbers.reference", rows, args=args, reference=rows).refused == 0


def test_a_random_reference_is_not_compared(asked):
    report = asked("numbers.reference", torch.dropout, args=(tensor("n"), 0.5, True), reference=torch.dropout)
    assert "random" in report.skipped[0].reason


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (lambda x: x.exp() / x.exp().sum(-1, keepdim=True), lambda x: x.softmax(-1)),
        (lambda x: x.nan_to_num(-1e30, None, None).amax(-1), lambda x: x.amax(-1)),
        (lambda x: torch.where(x > 0, x, 0.0), torch.relu),
        (lambda x: 0 - x, torch.neg),
    ],
)
def test_extreme_numbers_are_found(fails, wrong, right):
    fails("numbers.extreme", wrong, args=(tensor("b 5"),), reference=right)


def test_right_choices_at_extremes_hold(holds):
    def exp2_softmax(x):
        wide = x.float()
        e = ((wide - wide.amax(-1, keepdim=True)) * 1.4426950408889634).exp2()
        return (e / e.sum(-1, keepdim=True)).to(x.dtype)

    narrow = tensor("b 5", (torch.float32, torch.bfloat16, torch.float16))
    holds("numbers.extreme", exp2_softmax, args=(narrow,), reference=lambda x: x.softmax(-1))


def test_numbers_too_large_to_be_squared_may_overflow_in_one_formula_and_not_in_another(holds):
    def norm(x):
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)

    args = (tensor("b 4", (torch.float32, torch.float64)),)
    holds("numbers.extreme", norm, args=args, reference=lambda x: torch.nn.functional.layer_norm(x, (4,)))


def test_an_operator_that_takes_nothing_is_found(fails, asked):
    def refuses(x):
        raise ValueError("never")

    failure = fails("numbers.accepts", refuses, args=(_ROWS,), reference=torch.sin)
    assert failure.message.startswith("none of ")
    assert not asked("numbers.accepts", refuses, args=(_ROWS,), reference=refuses).failures


def test_a_call_that_is_written_wrong_is_no_refusal(fails):
    def mistaken(x):
        return x.masked_fill(x > 3, "-inf") if x.numel() > 4 else x

    failure = fails("numbers.accepts", mistaken, args=(_ROWS,), reference=torch.clone)
    assert "TypeError" in failure.message


def test_what_happens_to_one_long_row_alone_is_found(fails):
    def clears(x):
        return torch.cat((x[:, :40], torch.zeros_like(x[:, 40:])), 1) if x.shape[0] == 1 else x.clone()

    fails("numbers.reference", clears, args=(_ROWS,), reference=torch.clone)


@pytest.mark.parametrize("right", [True, False])
def test_a_kernel_that_is_never_selected_is_compared_too(fails, holds, right):
    @opkit.custom_op("contract_numbers_tests::kernels", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x)

    op.register_kernel("cpu", lambda x: torch.sin(x) * (1 if right else 1.01), name="slow")
    op.register_kernel("cpu", torch.sin, name="fast", priority=1)
    holds("numbers.reference", op, args=(_ROWS,))
    if right:
        holds("numbers.kernels", op, args=(_ROWS,))
    else:
        assert "kernel 'slow'" in fails("numbers.kernels", op, args=(_ROWS,)).message
    opkit.remove(op.name)


def test_a_kernel_is_asked_only_for_the_calls_that_it_takes(holds):
    @opkit.custom_op("contract_numbers_tests::takes", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    seen = set()

    @op.register_kernel("cpu", dtypes=[torch.float32], name="single")
    def _(x):
        seen.add((x.dtype, x.shape[0] > 1))
        return x * 2

    @op.register_kernel("cpu", when=lambda x: x.shape[0] == 1, dtypes=[torch.float64], name="row")
    def _(x):
        seen.add((x.dtype, x.shape[0] > 1))
        return x * 2

    holds("numbers.kernels", op, args=(tensor("m n", (torch.float32, torch.float64, torch.bfloat16)),))
    assert seen == {(torch.float32, True), (torch.float32, False), (torch.float64, False)}
    opkit.remove(op.name)


def test_results_of_nothing(fails, holds):
    def forgotten(x):
        return x.sum() if x.numel() else torch.ones(())

    assert 0 in fails("numbers.empty", forgotten, args=(tensor("b d"),), reference=torch.sum).args[0].shape
    holds("numbers.empty", lambda x: x.sum(), args=(tensor("*b d"),), reference=torch.sum)


def test_integers(fails, holds):
    one = (tensor("n", (torch.int32, torch.int64)),)
    fails("numbers.integers", lambda x: x.float().sum(-1).long(), args=one, reference=_last_sum)
    both = (tensor("n", torch.int8), tensor("n", torch.int8))
    fails(
        "numbers.integers",
        lambda a, b: (a.int() + b.int()).clamp(-128, 127).to(torch.int8),
        args=both,
        reference=torch.add,
    )
    holds("numbers.integers", lambda a, b: (a.int() + b.int()).to(torch.int8), args=both, reference=torch.add)


def test_scalars(fails, holds):
    args = (tensor("n"), st.booleans(), st.integers(0, 9))
    right = lambda x, flag, k: x * k + flag  # noqa: E731
    fails("numbers.scalars", lambda x, flag, k: x * k, args=args, reference=right)
    fails("numbers.scalars", lambda x, flag, k: x * min(k, 8) + flag, args=args, reference=right)
    holds("numbers.scalars", lambda x, flag, k: k * x + flag, args=args, reference=right)


def test_dtypes(fails, holds):
    assert (
        fails("numbers.dtypes", lambda x: x.float() * 2, args=(_ROWS,), reference=_doubled).args[0].dtype
        != torch.float32
    )
    holds("numbers.dtypes", lambda x: x + x, args=(_ROWS,), reference=_doubled)


def test_accepts(fails, holds):
    failure = fails("numbers.accepts", lambda x: x * (2 / (x.shape[0] and 1)), args=(_ROWS,), reference=_doubled)
    assert "ZeroDivisionError" in failure.message

    def choosy(x):
        if x.shape[0] > 4:
            raise ValueError("at most four rows")
        return x * 2

    assert "four rows" in holds("numbers.accepts", choosy, args=(_ROWS,), reference=_doubled).remarks[0]


def test_integers_that_are_sizes_or_positions_are_never_huge(holds):
    seen = []

    def counted(x):
        seen.append(int(x.abs().max()) if x.numel() else 0)
        return torch.bincount(x)

    holds("numbers.integers", counted, args=(tensor("n", torch.int64),), reference=torch.bincount)
    table = torch.arange(9)

    def looked_up(x):
        seen.append(int(x.abs().max()) if x.numel() else 0)
        return table[x + 4]

    holds("numbers.integers", looked_up, args=(tensor("n", torch.int64),), reference=lambda x: table[x + 4])
    assert max(seen) <= 4


@pytest.mark.gpu
def test_numbers_on_a_gpu(fails, holds):
    args = (tensor("b n", (torch.float32, torch.bfloat16, torch.float64)),)

    def norm(x):
        return torch.nn.functional.layer_norm(x, x.shape[1:])

    def plain(x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        centred = wide - wide.mean(-1, keepdim=True)
        return (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    holds("numbers.reference", norm, args=args, reference=plain, device="cuda")
    holds("numbers.extreme", lambda x: x.softmax(-1), args=args, reference=lambda x: x.softmax(-1), device="cuda")
    fails("numbers.reference", lambda x: norm(x) * 1.01, args=args, reference=plain, device="cuda")


def test_probabilities_from_a_log_sum_exp_of_huge_equal_logits(fails, holds):
    def wrong(x):
        return (x - x.logsumexp(-1, keepdim=True)).exp()

    how = {"args": (_ROWS,), "reference": lambda x: x.softmax(-1)}
    assert "the result is 1.0 at [0, 0], and the reference's is 0.25" in fails("numbers.extreme", wrong, **how).message
    holds("numbers.extreme", lambda x: (x - x.amax(-1, keepdim=True)).softmax(-1) if x.numel() else x.clone(), **how)


def test_no_size_is_above_the_largest_of_a_tensor():
    seen = set[int]()

    def sin(x, y):
        seen.update(x.shape)
        return torch.sin(x) + y

    args = (tensor("*batch n", largest=9), tensor("n"))
    report = opkit.check(
        sin, args=args, reference=lambda x, y: torch.sin(x) + y, properties=["numbers.reference"], database=False
    )
    report.raise_for_failures()
    assert max(seen) == 9
    assert 0 in seen
