"""Decoding for sm_90a in CUDA C++, run on a processor in random orders of events: its numbers beside the reference's."""

import pytest
import torch
from cuda_on_cpu import NONE, filled, on_cpu, survives
from hopper_calls import BF16, FP16, arguments, compared
from paged_calls import UNLIMITED, Cache, of_pages

from opkit.attn import reference
from opkit.attn.gpu.hopper import decode_cuda
from opkit.attn.masks import program

pytestmark = pytest.mark.emulated

DECODED = {  # (batch, heads of queries and of keys, queries, keys), and what else
    "some keys": ((1, (4, 1), 1, 300), {}),
    "tails": ((2, (6, 2), 2, 77), {}),
    "one key": ((1, (2, 1), 1, 1), {}),
    "a set of rows": ((1, (16, 1), 1, 513), {}),
    "some rows of another": ((1, (40, 2), 1, 300), {"sinks": torch.linspace(-1, 3, 40)}),
    "all rows": ((2, (16, 1), 2, 150), {"out_is_bshd": True}),
    "more rows": ((1, (66, 2), 1, 700), {"sinks": torch.linspace(-1, 3, 66)}),
    "as many as there may be": ((1, (32, 1), 2, 130), {}),
    "many rows in a window": ((1, (40, 1), 1, 1000), {"mask": (program.BAND, 101, 700)}),
    "many rows with nothing to see": ((1, (40, 1), 1, 100), {"mask": (program.BAND, 300, 400)}),
    "a window": ((1, (2, 1), 1, 1000), {"mask": (program.BAND, 101, 700)}),
    "queries that see all": ((1, (8, 2), 4, 50), {"mask": (program.BAND, -10, 60)}),
    "nothing to see": ((1, (2, 1), 1, 100), {"mask": (program.BAND, 300, 400)}),
    "sinks": ((1, (4, 2), 1, 200), {"sinks": torch.linspace(-1, 3, 4)}),
    "nothing to see but sinks": ((1, (4, 2), 1, 20), {"sinks": torch.ones(4), "mask": (program.BAND, 30, 40)}),
    "heads inside": ((2, (4, 2), 2, 100), {"out_is_bshd": True, "scale": 0.3}),
}


def divided(monkeypatch, splits):
    """Calls have so many splits, also where there are none of keys."""
    for module in (decode_cuda, decode_cuda):
        monkeypatch.setattr(module, "splits_of", lambda *sizes: splits)


class TestDecoding:
    @pytest.mark.sweep
    @pytest.mark.parametrize("splits", [1, 3])
    @pytest.mark.parametrize(("head", "dtype"), [(64, BF16), (128, FP16), (256, BF16)])
    @pytest.mark.parametrize("case", DECODED)
    def test_numbers_are_the_references(self, machine, monkeypatch, case, head, dtype, splits):
        divided(monkeypatch, splits)
        sizes, what = DECODED[case]
        if sizes[1][0] // sizes[1][1] * sizes[2] > decode_cuda.MOST_ROWS[head]:
            pytest.skip("wide heads have fewer rows")
        given = arguments(*filled(*sizes, head, head, dtype, what.get("out_is_bshd", False)), **what)
        compared(given, decode_cuda.decode(*given))

    @pytest.mark.parametrize("splits", [32, 70])
    def test_many_splits(self, machine, monkeypatch, splits):
        divided(monkeypatch, splits)
        given = arguments(*filled(1, (2, 1), 1, 4000))
        compared(given, decode_cuda.decode(*given))

    @pytest.mark.sweep
    @pytest.mark.parametrize("heads", [(6, 2), (34, 2)])
    @pytest.mark.parametrize("order", range(1, 6))
    def test_any_order_of_events_gives_the_same(self, machine, monkeypatch, order, heads):
        divided(monkeypatch, 2)
        given = arguments(*filled(1, heads, 2, 1500))
        machine[0] = order
        found = decode_cuda.decode(*given)
        machine[0] = 0
        assert all(map(torch.equal, found, decode_cuda.decode(*given)))

    @pytest.mark.parametrize("heads", [(4, 2), (40, 2)])
    def test_huge_logits(self, machine, monkeypatch, heads):
        divided(monkeypatch, 2)
        q, k, v = filled(1, heads, 1, 400, 64, 64)
        out, lse = decode_cuda.decode(*arguments(2**17 * q, 2**17 * k, v))
        exact, exact_lse = reference.attention(*arguments(2**17 * q.double(), 2**17 * k.double(), v.double()))
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=0.02)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=0)

    @pytest.mark.parametrize("heads", [(4, 2), (40, 2)])
    def test_hidden_keys_and_values_do_not_leak(self, machine, monkeypatch, heads):
        divided(monkeypatch, 2)
        q, k, v = filled(1, heads, 1, 400, 128, 128)
        for at in (slice(None, 50), slice(333, None)):
            k[:, :, at], v[:, :, at] = float("nan"), float("inf")
        given = arguments(q, k, v, mask=(program.BAND, 50, 332))
        compared(given, decode_cuda.decode(*given))

    @pytest.mark.parametrize("heads", [(6, 2), (22, 2)])
    def test_its_room_is_as_large_as_what_it_puts_there(self, machine, monkeypatch, heads):
        divided(monkeypatch, 3)
        made = []

        def guarded(x, size):
            made.append(torch.full((size + 256,), 7.0))
            return made[-1][:size]

        monkeypatch.setattr(decode_cuda, "allocate_scratch", guarded)
        decode_cuda.decode(*arguments(*filled(2, heads, 3, 500)))
        assert (made[0][-256:] == 7).all()
        assert made[0][-257] != 7  # the last sum

    def test_strides_that_tma_cannot_follow_are_copied(self, machine):
        q, k, v = filled(1, (4, 2), 1, 150)
        given = arguments(q, k.mT.contiguous().mT, torch.nn.functional.pad(v, (3, 0))[..., 3:])
        compared(given, decode_cuda.decode(*given))


RAGGED = [130, 5, 0, 77, 300]
PAGED = {  # starts, the size of pages, and what else
    "a query to each": ([0, 1, 2, 2, 3, 4], 16, {}),
    "larger pages": ([0, 1, 2, 2, 3, 4], 48, {}),
    "pages of 64": ([0, 1, 2, 2, 3, 4], 64, {}),
    "ragged queries": ([0, 3, 4, 4, 4, 7], 32, {}),
    "a window": ([0, 1, 2, 3, 4, 5], 16, {"lower": -70}),
    "keys far behind": ([0, 1, 2, 3, 4, 5], 16, {"lower": -70, "upper": -40}),
    "nothing to see": ([0, 1, 2, 3, 4, 5], 16, {"lower": 3, "upper": 9}),
    "sinks": ([0, 1, 2, 3, 4, 5], 16, {"sinks": torch.linspace(-1, 2, 6)}),
    "keys ahead": ([0, 2, 3, 3, 4, 6], 16, {"upper": UNLIMITED}),
}


class TestPages:
    @pytest.mark.sweep
    @pytest.mark.parametrize("splits", [1, 3])
    @pytest.mark.parametrize(("head", "dtype"), [(64, BF16), (128, FP16), (256, BF16)])
    @pytest.mark.parametrize("case", PAGED)
    def test_numbers_are_those_of_float64(self, machine, monkeypatch, case, head, dtype, splits):
        divided(monkeypatch, splits)
        starts, page, what = PAGED[case]
        cache = Cache(RAGGED, page, 2, head, dtype=dtype)
        q, what = cache.queries(starts[-1], 6, dtype), what | {"scale": head**-0.5}
        of_pages(decode_cuda.paged(*cache.call(q, starts, **what)), cache, q, starts, **what)

    @pytest.mark.sweep
    @pytest.mark.parametrize("splits", [1, 2])
    @pytest.mark.parametrize(
        ("head", "dtype", "heads"), [(64, BF16, 27), (128, FP16, 27), (64, BF16, 60), (128, FP16, 64), (256, BF16, 20)]
    )
    def test_many_rows(self, machine, monkeypatch, head, dtype, heads, splits):
        divided(monkeypatch, splits)
        cache = Cache(RAGGED, 16, 1, head, dtype=dtype)
        starts, what = [0, 1, 2, 3, 4, 5], {"scale": head**-0.5, "lower": -90}
        q = cache.queries(5, heads, dtype)
        of_pages(decode_cuda.paged(*cache.call(q, starts, **what)), cache, q, starts, **what)

    @pytest.mark.parametrize("order", range(1, 5))
    def test_any_order_of_events_gives_the_same(self, machine, monkeypatch, order):
        divided(monkeypatch, 2)
        cache = Cache([900, 40, 333], 16, 1, 64, dtype=BF16)
        given = cache.call(cache.queries(3, 4, BF16), [0, 1, 2, 3])
        machine[0] = order
        found = decode_cuda.paged(*given)
        machine[0] = 0
        assert all(map(torch.equal, found, decode_cuda.paged(*given)))

    def test_many_sequences(self, machine, monkeypatch):
        divided(monkeypatch, 1)
        cache = Cache([n % 7 * 9 for n in range(70)], 16, 1, 64, dtype=BF16)
        starts = [0] * 30 + [1] * 20 + [2] * 20 + [3]  # sequences 29, 49 and 69
        q = cache.queries(3, 2, BF16)
        of_pages(decode_cuda.paged(*cache.call(q, starts)), cache, q, starts)

    def test_numbers_of_32_bits_and_tables_with_strides(self, machine, monkeypatch):
        divided(monkeypatch, 2)
        cache = Cache([130, 77], 16, 2, 64, dtype=BF16)
        q = cache.queries(2, 4, BF16)
        given = list(cache.call(q, [0, 1, 2]))
        given[3] = torch.cat([given[3].long(), given[3].long() + 5], 1)[:, : given[3].shape[1]]
        given[4], given[5] = given[4].int(), given[5].int()
        of_pages(decode_cuda.paged(*given), cache, q, [0, 1, 2])

    def test_what_is_out_of_range_is_taken_as_the_nearest(self, machine, monkeypatch):
        """Lengths and starts that are too large, and numbers of pages that there are none of."""
        divided(monkeypatch, 2)
        cache = Cache([100, 50], 16, 1, 64, dtype=BF16)
        q, pages = cache.queries(2, 2, BF16), cache.k.shape[0]
        cache.k.nan_to_num_(), cache.v.nan_to_num_()
        given = list(cache.call(q, [0, 1, 2]))
        given[3], given[4] = given[3].clone(), torch.tensor([2**40, -3])
        given[3][0, 1], given[3][0, 2], given[5] = 10**6, -5, torch.tensor([-(2**40), 1, 2**40])
        found = decode_cuda.paged(*given)
        given[3] = given[3].clamp(0, pages - 1)
        given[4], given[5] = torch.tensor([given[3].shape[1] * 16, 0]), torch.tensor([0, 1, 2])
        assert all(map(torch.equal, found, decode_cuda.paged(*given)))

    def test_queries_and_pages_with_strides(self, machine, monkeypatch):
        divided(monkeypatch, 2)
        cache = Cache([130, 77], 16, 2, 64, dtype=BF16)
        q = cache.queries(2, 4, BF16)
        given = list(cache.call(torch.nn.functional.pad(q, (3, 0))[..., 3:], [0, 1, 2]))
        given[1], given[2] = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in given[1:3])
        of_pages(decode_cuda.paged(*given), cache, q, [0, 1, 2])


OTHERS = r"(?m)^    \w+\(\w+?_{}_\d+##.*\n"  # kernels for other heads
TO_PAGES = r"DECODES\(_paged, true\)"
TO_NONE = r"DECODES\(, false\)"
DEFECTS = {
    "none": NONE,
    "values that are not waited for": ("        wait(shared.filled + 8, number % 2);\n", ""),
    "keys that are overwritten": (
        "        multiply_keys<L>(mine, queries, shared.keys);\n        __syncwarp();\n        load_keys(number + 1);\n",
        "        load_keys(number + 1);\n        multiply_keys<L>(mine, queries, shared.keys);\n",
    ),
    "warps that are not waited for": (
        "    __syncthreads();\n    merge_warps(", "    merge_warps("
    ),
    "a key too many": ("at >= reach.end) s[j]", "at > reach.end) s[j]"),
    "a split too few": ("split < problem.splits ? found.x", "split < problem.splits - 1 ? found.x"),
}  # fmt: skip
DEFECTS_OF_SETS = {
    "queries of the first set for all": ("at + set * 16 * L::QUERY_BYTES", "at"),
    "sums of the first set for all": ("16 * set + lane / 4 + 8 * h", "lane / 4 + 8 * h"),
}
DEFECTS_TOGETHER = {
    "none": NONE,
    "keys that are not waited for": (
        "        wait(shared.filled(at.stage, 0), at.parity);\n        begin_logits(at);\n", "        begin_logits(at);\n"
    ),
    "keys that are overwritten": (
        "        products_wait<LATER>();\n        hold(s);\n        free(at.stage, 0);\n",
        "        free(at.stage, 0);\n        products_wait<LATER>();\n        hold(s);\n",
    ),
    "values that are overwritten": (
        "            sums_done();\n            free(before.stage, 1);\n",
        "            free(before.stage, 1);\n            sums_done();\n",
    ),
    "weights that are overwritten": ("shared.weights(number % 2)", "shared.weights(0)"),
    "weights that are not waited for": (
        "        fence_stores();\n        named_sync(MULTIPLIERS, WARPGROUP);\n    }", "        fence_stores();\n    }"
    ),
    "maxima of each warp for itself": ("tops + warp * L::ROWS + 8", "tops + threadIdx.x / LANES * L::ROWS + 8"),
    "a key too many": ("key < reach.end; }", "key <= reach.end; }"),
}  # fmt: skip


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("heads", "defect"),
    [
        *((3, each) for each in DEFECTS.values()),
        *((19, each) for each in DEFECTS_OF_SETS.values()),
        *((35, each) for each in DEFECTS_TOGETHER.values()),
    ],
    ids=[*DEFECTS, *DEFECTS_OF_SETS, *(f"together: {name}" for name in DEFECTS_TOGETHER)],
)
def test_defects_are_found(heads, defect, tmp_path, monkeypatch):
    divided(monkeypatch, 2)
    given = arguments(*filled(1, (heads, 1), 1, 1537))
    unused = f"{OTHERS.format('(128|256)')}|{TO_PAGES}"
    with pytest.MonkeyPatch.context() as patch, on_cpu(patch, tmp_path, defect, unused=unused) as seed:
        found = survives(seed, lambda: decode_cuda.decode(*given), lambda found: compared(given, found))
        assert found == (defect is NONE)


PAGED_DEFECTS = {
    "none": NONE,
    "values after the last key": ("if (L::PAGED && some) multiply_values", "if (false) multiply_values"),
    "a key before the first": ("at < reach.begin ||", "at + 1 < reach.begin ||"),
    "a page that another has": ("reach.row + number,", "number,"),
}
PAGED_DEFECTS_TOGETHER = {
    "none": NONE,
    "values after the last key": ("if (L::PAGED && some(key_of(number)))", "if (false)"),
    "channels of another box": ("place.within, box,", "place.within, 0,"),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("head", "heads", "defect"),
    [
        *((64, 2, each) for each in PAGED_DEFECTS.values()),
        *((128, 33, each) for each in PAGED_DEFECTS_TOGETHER.values()),
    ],
    ids=[*PAGED_DEFECTS, *(f"together: {name}" for name in PAGED_DEFECTS_TOGETHER)],
)
def test_defects_of_pages_are_found(head, heads, defect, tmp_path, monkeypatch):
    divided(monkeypatch, 2)
    cache = Cache([333, 290], 16, 1, head, dtype=BF16)
    q, starts, what = cache.queries(2, heads, BF16), [0, 1, 2], {"lower": -200, "scale": head**-0.5}
    unused = f"{OTHERS.format(f'(?!{head}_)[0-9]+')}|{TO_NONE}"
    with pytest.MonkeyPatch.context() as patch, on_cpu(patch, tmp_path, defect, unused=unused) as seed:
        run = lambda: decode_cuda.paged(*cache.call(q, starts, **what))  # noqa: E731
        found = survives(seed, run, lambda found: of_pages(found, cache, q, starts, **what))
        assert found == (defect is NONE)
