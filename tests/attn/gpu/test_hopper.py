"""The forward kernel for sm_90: it compiles as it must here, and its numbers are right where there is such a GPU."""

import pytest
import torch
from hopper_calls import (
    BF16,
    CAUSAL,
    FAR,
    FP16,
    arguments,
    bottom_right,
    check_compiled,
    compared,
    filled,
    on_hopper,
    overflowing,
    refuses,
    requested,
    shaped,
    unlike,
)

from opkit.attn import reference
from opkit.attn.calls import AttentionCall
from opkit.attn.gpu.hopper import forward as hopper
from opkit.attn.masks import program
from opkit.kernels.triton import compiling

# ---- compiled --------------------------------------------------------------------------------------------------------

COMPILED = {  # registers before they are shared out, and the call
    "128": (168, lambda: arguments(*shaped((4, 2), 300, 300, 128, 128))),
    "128, causal": (168, lambda: arguments(*shaped((4, 2), 300, 300, 128, 128), mask=CAUSAL)),
    "128, causal, float16, sinks, capped": (
        168,
        lambda: arguments(
            *shaped((4, 2), 300, 300, 128, 128, FP16), mask=CAUSAL, sinks=torch.empty(4, device="meta"), softcap=30.0
        ),
    ),
    "96, causal": (168, lambda: arguments(*shaped((4, 2), 300, 300, 96, 96), mask=CAUSAL)),
    "64": (168, lambda: arguments(*shaped((4, 2), 300, 300, 64, 64))),
    "64, causal": (168, lambda: arguments(*shaped((4, 2), 300, 300, 64, 64), mask=CAUSAL)),
    "256": (168, lambda: arguments(*shaped((4, 2), 300, 300, 256, 256))),
    "256, causal": (168, lambda: arguments(*shaped((4, 2), 300, 300, 256, 256), mask=CAUSAL)),
    "192 and 128, causal": (168, lambda: arguments(*shaped((4, 2), 300, 300, 192, 128), mask=CAUSAL)),
    "64 and 256, causal": (168, lambda: arguments(*shaped((4, 2), 300, 300, 64, 256), mask=CAUSAL)),
}


def run_with(tile, given):
    """A call with a layout that it might not get."""
    return hopper._prepared(AttentionCall(*given), tile)(*given)


@pytest.mark.sweep(keep=["96, causal"])
@pytest.mark.parametrize("case", COMPILED)
def test_compiles_without_spills(case, tmp_path, record_property):
    registers, given = COMPILED[case]
    spilled = 8 if case == "256, causal" else 0  # where rows are marked that are computed again
    check_compiled(lambda: hopper.forward(*given()), registers, tmp_path, record_property, spilled)


@pytest.mark.exhaustive
def test_three_warpgroups_compile_without_spills(tmp_path, record_property):
    given = arguments(*shaped((4, 2), 3000, 300, 64, 64))
    check_compiled(lambda: run_with(hopper.LONG, given), 128, tmp_path, record_property)


def test_other_lengths_and_bands_compile_nothing_anew():
    def identity(queries, keys, lower, upper, heads=(4, 2)):
        band = (program.BAND, lower, upper)
        return compiling.identity(requested(arguments(*shaped(heads, queries, keys, 128, 128), mask=band)))

    first = identity(300, 300, -FAR, 0)
    assert identity(1, 1, -1, 0) == identity(4096, 512, -16, 16) == identity(77, 1000, 1, FAR, heads=(8, 1)) == first
    assert compiling.identity(requested(arguments(*shaped((4, 2), 300, 300, 128, 128)))) != first


@pytest.mark.exhaustive
def test_large_tensors_compile_with_wide_indices():
    request = requested(arguments(*shaped((16, 16), 2**20, 2**20, 128, 128), mask=CAUSAL))
    assert request.wide
    compiling.lowered(request)


# ---- what it takes ---------------------------------------------------------------------------------------------------

REFUSED = {
    "float32": lambda: arguments(*shaped((4, 2), 8, 8, 64, 64, torch.float32)),
    "a head of 100": lambda: arguments(*shaped((4, 2), 8, 8, 100, 64)),
    "a head of 264": lambda: arguments(*shaped((4, 2), 8, 8, 64, 264)),
    "heads that do not divide": lambda: arguments(*shaped((4, 3), 8, 8, 64, 64)),
    "no keys": lambda: arguments(*shaped((4, 2), 8, 0, 64, 64)),
    "no queries": lambda: arguments(*shaped((4, 2), 0, 8, 64, 64)),
    "dropout": lambda: arguments(*shaped((4, 2), 8, 8, 64, 64), dropout_p=0.5),
    "a mask without its tensors": lambda: arguments(*shaped((4, 2), 8, 8, 64, 64), mask=(program.LENGTH, 0)),
    "a bias": lambda: arguments(*shaped((4, 2), 8, 8, 64, 64), bias=(program.BIAS_ALIBI, 0)),
    "a negative scale": lambda: arguments(*shaped((4, 2), 8, 8, 64, 64), scale=-1.0),
    "sinks of other heads": lambda: arguments(*shaped((4, 2), 8, 8, 64, 64), sinks=torch.empty(3, device="meta")),
}


def test_refuses():
    assert not unlike(REFUSED, refuses(hopper.forward, r"kernel 'hopper' does not take q, k, v of .* Leave the choice"))


def test_takes_nothing_that_is_not_on_such_a_gpu():
    call = AttentionCall(*arguments(*shaped((4, 2), 8, 8, 64, 64, device="cpu")))
    assert not hopper.takes(call)


def misaligned(x):
    """The same with the same strides, eight bytes after a multiple of sixteen."""
    room = torch.empty(x.untyped_storage().nbytes() // x.element_size() + 8, dtype=x.dtype, device=x.device)
    start = (16 - room.data_ptr() % 16) // x.element_size() % 8 + 4
    return room[start:].as_strided(x.shape, x.stride()).copy_(x)


SECTIONS = {  # (batch, heads of queries and of keys, keys, head): heads that are interleaved
    (16, 16, 16, 512, 128): 64,
    (16, 16, 16, 1024, 128): 32,
    (16, 16, 16, 1024, 64): 64,
    (16, 16, 16, 512, 256): 32,
    (8, 16, 16, 2048, 128): 32,
    (2, 16, 16, 8192, 128): 8,
    (2, 8, 8, 8192, 256): 2,
    (1, 16, 16, 2**20, 128): 1,
    (1, 16, 4, 2**20, 128): 4,
    (2, 32, 4, 8192, 128): 64,
    (1, 4, 4, 512, 128): 4,
}


def test_so_many_heads_are_interleaved():
    found = {
        (batch, *heads, keys, head): hopper.section(*shaped(heads, keys, keys, head, head, batch=batch))
        for batch, *heads, keys, head in SECTIONS
    }
    assert found == SECTIONS


def test_each_launch_sees_the_strides_of_its_first(monkeypatch):
    """A launch is prepared for one layout: tensors that are copied for TMA have another than those that are not."""
    seen = []

    class Launch:
        def __init__(self, kernel, names, numbers):
            self.names = names

        def repeated(self, *tensors):
            return None, []

        def __call__(self, q, k, v, *rest):
            seen.append((self, [x.stride() for x in (q, k, v)], max(x.data_ptr() % 16 for x in (q, k, v))))

    monkeypatch.setattr(hopper, "PreparedLaunch", Launch)
    inside = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in shaped((4, 2), 30, 30, 64, 64, device="cpu")]
    moved = [misaligned(x) for x in inside]
    assert all(x.data_ptr() % 16 == 8 for x in moved)
    run = hopper.forward.prepare(*arguments(*inside))
    for tensors in (inside, moved, [inside[0], *moved[1:]], inside):
        run(*arguments(*tensors))
    assert [seen[0][0] is launch for launch, *_ in seen] == [True, False, False, True]
    for launch, strides, offset in seen:
        assert offset == 0
        assert all(strides == others for other, others, _ in seen if other is launch)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def window(width):
    return program.BAND, -width, 0


CALLS = {  # (batch, heads of queries and of keys, queries, keys, head, columns), and what else
    "one tile": ((1, (1, 1), 128, 128, 128, 128), {}),
    "one tile, causal": ((1, (1, 1), 128, 128, 128, 128), {"mask": CAUSAL}),
    "tails": ((2, (4, 2), 333, 300, 128, 128), {}),
    "tails, causal": ((2, (4, 2), 300, 300, 128, 128), {"mask": CAUSAL}),
    "one query": ((1, (2, 1), 1, 77, 128, 128), {}),
    "one key": ((3, (5, 1), 129, 1, 128, 128), {}),
    "few queries, bottom right": ((1, (1, 1), 64, 2048, 128, 128), {"mask": bottom_right(64, 2048)}),
    "dead rows": ((1, (2, 2), 500, 70, 128, 128), {"mask": bottom_right(500, 70)}),
    "all rows dead": ((1, (2, 1), 200, 200, 128, 128), {"mask": (program.BAND, 1000, 2000)}),
    "window": ((2, (4, 1), 1000, 1000, 128, 128), {"mask": window(100)}),
    "narrow window": ((1, (3, 3), 257, 777, 128, 128), {"mask": (program.BAND, 5, 40)}),
    "window far behind": ((1, (3, 3), 257, 777, 128, 128), {"mask": (program.BAND, -300, -200)}),
    "many tiles": ((8, (16, 4), 640, 640, 128, 128), {"mask": CAUSAL}),
    "many tiles, 64": ((8, (16, 4), 640, 640, 64, 64), {"mask": CAUSAL}),
    "many tiles of one step, 64": ((8, (16, 4), 640, 100, 64, 64), {}),
    "a last section that is smaller": ((1, (70, 70), 1024, 1024, 128, 128), {"mask": CAUSAL}),
    "heads inside": ((2, (4, 2), 300, 300, 128, 128), {"mask": CAUSAL, "out_is_bshd": True}),
    "sinks": ((1, (4, 2), 300, 200, 128, 128), {"mask": bottom_right(300, 200), "sinks": True}),
    "capped": ((2, (4, 2), 300, 300, 128, 128), {"mask": CAUSAL, "softcap": 3.0}),
    "sinks and capped": ((2, (4, 2), 300, 300, 128, 128), {"sinks": True, "softcap": 30.0}),
    "96": ((2, (4, 2), 300, 300, 96, 96), {"mask": CAUSAL, "out_is_bshd": True}),
    "72 and 128": ((1, (2, 1), 190, 190, 72, 128), {"mask": CAUSAL}),
    "64": ((2, (4, 2), 777, 777, 64, 64), {}),
    "64, causal": ((2, (16, 16), 1024, 1024, 64, 64), {"mask": CAUSAL}),
    "40": ((2, (4, 2), 300, 300, 40, 40), {"mask": CAUSAL}),
    "256": ((2, (4, 2), 300, 300, 256, 256), {}),
    "256, causal": ((2, (4, 2), 300, 300, 256, 256), {"mask": CAUSAL}),
    "192 and 128": ((1, (2, 1), 300, 300, 192, 128), {"mask": CAUSAL}),
    "64 and 256": ((1, (2, 1), 300, 300, 64, 256), {"mask": CAUSAL}),
    "160 and 200": ((1, (2, 1), 500, 300, 160, 200), {"mask": CAUSAL}),
}


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("case", CALLS)
class TestNumbers:
    pytestmark = on_hopper

    def test_are_the_references(self, case, dtype):
        sizes, what = CALLS[case]
        tensors = filled(*sizes, dtype=dtype, out_is_bshd=what.get("out_is_bshd", False))
        sinks = torch.randn(sizes[1][0], device="cuda") if what.get("sinks") else None
        compared(arguments(*tensors, **{**what, "sinks": sinks}))


class TestOnGpu:
    pytestmark = on_hopper

    @pytest.mark.parametrize(
        ("head", "mask"),
        [(128, CAUSAL), (64, window(50)), (256, CAUSAL), (128, bottom_right(300, 200)), (96, (program.BAND, -40, 30))],
    )
    def test_hidden_keys_and_values_do_not_leak(self, head, mask):
        q, k, v = filled(1, (2, 1), 300, 300, head, head)
        for j in (3, 150, 299):
            k[:, :, j], v[:, :, j, ::3], v[:, :, j, 1] = float("nan"), float("inf"), float("nan")
        out, lse = hopper.forward(*(given := arguments(q, k, v, mask=mask)))
        expected, of_rows = reference.attention(*[x.double() if isinstance(x, torch.Tensor) else x for x in given])
        clean = expected.isfinite().all(-1)
        assert 0 < clean.sum() < clean.numel()
        torch.testing.assert_close(out[clean].double(), expected[clean], rtol=1e-2, atol=1e-2)
        assert out[~clean].isnan().any(-1).all()
        torch.testing.assert_close(lse.double(), of_rows, rtol=1e-5, atol=1e-4, equal_nan=True)

    @pytest.mark.parametrize(("queries", "keys"), [(1500, 777), (100, 1), (193, 128)])
    def test_three_warpgroups(self, queries, keys):
        given = arguments(*filled(2, (4, 2), queries, keys, 64, 64), sinks=torch.randn(4, device="cuda"))
        compared(given, run_with(hopper.LONG, given))

    @pytest.mark.parametrize("keys", [300, 500])  # small logits are visited after a tile of large ones, or after two
    @pytest.mark.parametrize("head", [64, 128, 256])
    def test_rounded_weights_that_overflow_before_a_greater_logit_comes(self, head, keys):
        compared(given := overflowing(head, "cuda", keys=keys))
        if head == 64:
            compared(given, run_with(hopper.LONG, given))

    def test_padding_in_memory_does_not_leak(self):
        q, k, v = filled(2, (2, 2), 300, 400, 128, 128)
        k[:, :, 300:], v[:, :, 300:] = float("nan"), float("nan")
        compared(arguments(q, k[:, :, :300], v[:, :, :300]))
        compared(arguments(q, k[:, :, :300], v[:, :, :300], mask=CAUSAL))

    def test_strides_that_tma_cannot_follow_are_copied(self):
        q, k, v = filled(2, (4, 2), 200, 200, 64, 64)
        q = torch.randn(2, 4, 64, 200, device="cuda").to(BF16).mT
        k = torch.randn(2, 2, 200, 67, device="cuda").to(BF16)[..., 3:]
        v = v[:, :1].expand(2, 2, 200, 64)
        compared(arguments(q, k, v, mask=CAUSAL))

    def test_tensors_that_are_not_aligned_after_some_that_are(self):
        inside = filled(2, (4, 2), 200, 200, 64, 64, out_is_bshd=True)
        given = arguments(*inside, mask=CAUSAL)
        run = hopper.forward.prepare(*given)
        for tensors in (inside, [misaligned(x) for x in inside], inside):
            compared(given, run(*arguments(*tensors, mask=CAUSAL)))

    def test_it_is_deterministic_and_leaves_the_counter_as_it_was(self):
        given = arguments(*filled(4, (16, 4), 700, 900, 128, 128), mask=CAUSAL)
        first = hopper.forward(*given)
        for _ in range(3):
            assert all(map(torch.equal, first, hopper.forward(*given)))
        torch.cuda.synchronize()
        assert all((counter == 0).all() for counter in hopper._known_counters.values())

    def test_streams_do_not_share_a_counter(self):
        given = [arguments(*filled(8, (16, 16), 1024, 1024, 64, 64), mask=CAUSAL) for _ in range(2)]
        alone = [hopper.forward(*each) for each in given]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in given]
        found = []
        for _ in range(8):
            for stream, each in zip(streams, given, strict=True):
                with torch.cuda.stream(stream):
                    found.append(hopper.forward(*each))
        torch.cuda.synchronize()
        for number, each in enumerate(found):
            assert all(map(torch.equal, alone[number % 2], each))

    def test_a_graph_can_be_captured(self):
        given = arguments(*filled(2, (4, 2), 300, 300, 128, 128), mask=CAUSAL)
        expected = hopper.forward(*given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = hopper.forward(*given)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, expected, found))

    def test_takes(self):
        call = AttentionCall(*arguments(*filled(1, (2, 1), 8, 8, 64, 64), mask=CAUSAL))
        assert hopper.takes(call)
