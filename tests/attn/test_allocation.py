"""What kernels overwrite wholly is not filled first where torch fills new memory, and is like any other tensor elsewhere."""

import pytest
import torch
import torch.utils.deterministic
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import opkit
from opkit.attn import allocation
from opkit.attn.allocation import allocate_scratch, overwritten
from opkit.masks import Causal
from opkit.op.layout.outputs import unfilled

CPU = torch.device("cpu")


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# Of each, an example: dense in an order of its own, of other dtypes, of none.
EXAMPLES = {
    "contiguous": lambda: torch.empty(3, 40, 50),
    "heads inside": lambda: allocation.rows(torch.empty(2, 3, 40, 5), 50, True),
    "bfloat16": lambda: torch.empty(70, 80, dtype=torch.bfloat16),
    "few": lambda: torch.empty(3, 4, dtype=torch.float16),
    "none": lambda: torch.empty(3, 0, 4),
    "meta": lambda: torch.empty(70, 80, device="meta").t(),
}  # fmt: skip


def like(x, example):
    assert (x.shape, x.dtype, x.device) == (example.shape, example.dtype, example.device)
    assert x.stride() == example.stride() or not x.numel()
    assert x.untyped_storage().nbytes() == x.nbytes
    return x.zero_()


@pytest.mark.sweep
@pytest.mark.parametrize("fill", [True, False])
@pytest.mark.parametrize("case", EXAMPLES)
def test_results_are_like_their_example(case, fill, deterministic, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", fill)
    example = EXAMPLES[case]()
    expected = EXAMPLES[case]()
    make = overwritten(example)
    made = [like(make(), expected) for _ in range(2)]
    torch.use_deterministic_algorithms(False)
    made += [like(make(), expected) for _ in range(2)]
    if expected.numel() and expected.device == CPU:
        assert len({x.data_ptr() for x in made}) == 4


def test_nothing_is_filled_under_determinism(deterministic):
    make = overwritten(torch.empty(300, 400))
    for run in (
        make,
        lambda: unfilled((30, 400), None, dtype=torch.float32, device=CPU),
        lambda: allocate_scratch(torch.ones(1), 3000),
    ):
        assert fill_sizes(run) == []
    assert not overwritten(torch.empty(10_000_000))().isnan().all()
    assert torch.empty(10_000_000).isnan().all()


@pytest.mark.parametrize("size", [5, (3, 4), (0, 2)])
def test_room(size, deterministic):
    for ordered in (True, False):
        torch.use_deterministic_algorithms(ordered)
        found = [
            unfilled(size if isinstance(size, tuple) else (size,), None, dtype=torch.int32, device=CPU),
            allocate_scratch(torch.ones(2, dtype=torch.int32), size),
            allocate_scratch(torch.ones(2), size, torch.int32),
        ]
        for each in found:
            like(each, torch.zeros(size, dtype=torch.int32))


def test_fake_tensors_stay_fake(deterministic):
    make = overwritten(torch.empty(70, 80))
    with FakeTensorMode():
        for each in (make(), overwritten(torch.empty(70, 80))(), unfilled((9,), None, dtype=torch.int32, device=CPU)):
            assert isinstance(each, FakeTensor)


def test_results_in_inference_mode_are_of_it(deterministic):
    make = overwritten(torch.empty(70, 80))
    with torch.inference_mode():
        assert make().is_inference()
        inside = overwritten(torch.empty(70, 80))
    assert not make().is_inference()
    assert not inside().is_inference()


def test_attention_is_right_and_fills_nothing(deterministic):
    q = [torch.randn(1, 4, 200, 32, requires_grad=True) for _ in range(3)]

    def gradients(**options):
        out, lse = opkit.attention(*q, mask=Causal(), return_lse=True, **options)
        return out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), q)

    expected = gradients(kernel="reference")
    fill_sizes(gradients)  # kernels are made ready
    assert fill_sizes(gradients) == []
    for got, want in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def fill_sizes(run):
    """How many elements each fill of more than a few had that was for new memory."""
    with torch.profiler.profile(record_shapes=True, acc_events=True) as profile:
        run()
    fills = [each for each in profile.events() if each.key == "aten::fill_" and "empty" in each.cpu_parent.key]
    sizes = [torch.Size(each.input_shapes[0]).numel() for each in fills]
    return [size for size in sizes if size > allocation.SMALL]


def test_fills_of_new_memory_are_seen(deterministic):
    assert fill_sizes(lambda: torch.empty(100, 100)) == [10_000]
