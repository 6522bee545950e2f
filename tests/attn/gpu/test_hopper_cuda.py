"""The kernels for sm_90a in CUDA C++ compile as they must, by NVRTC and nvcc; on such a GPU, the forward's numbers are right."""

import ctypes
import dataclasses
import re
import subprocess
from pathlib import Path

import pytest
import torch
from fake_gpu import imported
from hopper_calls import (
    BF16,
    CAUSAL,
    FP16,
    SHARED,
    arguments,
    bottom_right,
    compared,
    filled,
    on_hopper_with_compiler,
    overflowing,
    refuses,
    shaped,
    unlike,
)
from hopper_masks import documents, packed, padded, shuffled

from opkit.attn import api, reference
from opkit.attn.calls import AttentionCall
from opkit.attn.gpu.hopper import backward_cuda, decode_cuda, library
from opkit.attn.gpu.hopper import forward as gluon
from opkit.attn.gpu.hopper import forward_cuda as cuda
from opkit.attn.masks import program
from opkit.errors import KernelError, ToolchainError
from opkit.kernels.cc import build_plan, processes, toolchain
from opkit.masks import Causal, Segments

_fixtures = imported("opkit_fake_driver_of_cuda", Path(__file__).parents[2] / "kernels" / "conftest.py")
fake_libraries, fake = _fixtures.fake_libraries, _fixtures.fake
OF_FORWARD = [BF16, FP16, torch.float8_e4m3fn, torch.float8_e5m2]
OF_BACKWARD = {  # how many kernels multiply, and the most bytes that a thread puts aside
    "backward": (4, 300), "backward_of_lists": (2, 520), "backward_in_order": (4, 300), "backward_of_lists_in_order": (2, 760),
}  # fmt: skip

# ---- compiled --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["nvrtc", "nvcc"])
def compiler(request, settings):
    """A compiler of CUDA C++, which the settings choose."""
    settings(cuda_compiler=request.param)
    if not library.compiler_there():
        pytest.skip(f"needs {request.param}")
    return request.param


def resources(name, dtype, folder):
    """Of each kernel, as ptxas says: registers, and bytes of them that a thread stores to memory, and loads."""
    request = library.request(name, dtype)
    plan = build_plan.plan(dataclasses.replace(request, flags=(*request.flags, "-Xptxas", "-v")))
    for file, _, text in plan.sources:
        (folder / file).write_text(text)
    (command,) = plan.units
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    said = run.stdout + run.stderr
    assert not re.findall(r"\(C751\d\) Potential Performance Loss", said), (
        said
    )  # a product that waits for the one before it
    pattern = r"entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
    found = re.findall(pattern, said, re.DOTALL)
    made = library.Kernels(name, dtype, (folder / plan.file).read_bytes()).numbers
    problem = {
        "forward": cuda.ForwardProblem,
        "backward": backward_cuda.BackwardProblem,
        "decode": decode_cuda.DecodeProblem,
    }
    assert made["problem"] == (ctypes.sizeof(problem[library.source_of(name)]),)
    assert {kernel for kernel, *_ in found} == made.keys() - {"problem"}
    assert all(numbers[1] <= SHARED for kernel, numbers in made.items() if kernel != "problem")
    return {kernel: (int(registers), int(stored), int(loaded)) for kernel, stored, loaded, registers in found}


@pytest.mark.build
@pytest.mark.parametrize("dtype", OF_FORWARD, ids=str)
@pytest.mark.parametrize(
    ("name", "registers"),  # before these are shared out: of heads of 64 and few keys, of 64, and of 128 and 256
    [("forward", [96] * 2 + [128] * 2 + [168] * 4), ("forward_of_lists", [96, 168])],
)
@pytest.mark.usefixtures("compiler")
def test_the_forward_compiles_without_spills(name, registers, dtype, tmp_path, record_property):
    found = resources(name, dtype, tmp_path)
    record_property("resources", str(found))
    assert sorted(each for kernel, (each, *_) in found.items() if "attention" in kernel) == registers
    assert all(stored == loaded == 0 for _, stored, loaded in found.values())


@pytest.mark.build
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("name", "kernels", "spills"),  # of heads of 64 and 128, under a band, and without; of segments with any band
    [(name, *of) for name, of in OF_BACKWARD.items()],
)
@pytest.mark.usefixtures("compiler")
def test_the_backward_compiles_with_few_spills(name, kernels, spills, dtype, tmp_path, record_property):
    found = resources(name, dtype, tmp_path)
    record_property("resources", str(found))
    multiplying = [each for kernel, each in found.items() if "gradients" in kernel]
    assert [registers for registers, *_ in multiplying] == [168] * kernels
    assert (
        max(max(stored, loaded) for _, stored, loaded in multiplying) <= spills
    )  # in a step of lists a few, else none
    others = [each for kernel, each in found.items() if "gradients" not in kernel]
    assert all(stored == loaded == 0 for _, stored, loaded in others)


@pytest.mark.build
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.usefixtures("compiler")
def test_decoding_compiles_without_spills(dtype, tmp_path, record_property):
    found = resources("decode", dtype, tmp_path)
    record_property("resources", str(found))
    assert len(found) == 26  # ten for heads of 64, 128 and 256 by rows, of pages too; and what merges
    assert all(stored == loaded == 0 for _, stored, loaded in found.values())


def test_it_compiles_where_there_is_neither_nvcc_nor_a_c_compiler(monkeypatch, settings, tmp_path):
    settings(cache_dir=tmp_path)
    if toolchain.find("cuda").family != "nvrtc":
        pytest.skip("needs NVRTC")
    monkeypatch.setenv("PATH", str(tmp_path))
    library.kernels.cache_clear()
    kernels = library.kernels("forward_of_lists", BF16)
    assert set(kernels.numbers) == {"attention_64_brief_banded", "attention_128_banded", "problem"}
    monkeypatch.setattr(processes, "run", None)
    library.kernels.cache_clear()
    assert library.kernels("forward_of_lists", BF16).numbers == kernels.numbers  # from the cache


def test_a_launch_that_fails_raises(fake, monkeypatch):
    monkeypatch.setattr(library, "_driver", lambda: fake.driver)
    monkeypatch.setattr(library, "_numbers_in", lambda image: {"attention_128": (384, 200_000)})
    kernels = library.Kernels("forward", BF16, b"image")
    launch = kernels.launching([library.Step("attention_128", (7, 1, 1), early=True)], [], cuda.ForwardProblem, 0)
    launch(cuda.ForwardProblem(), 0x70)
    assert fake.launches[-1][1:7] == ["attention_128", "7,1,1", "384,1,1", "200000", "0x70", "6=1,0,0"]
    fake.fail("cuLaunchKernelEx", 701)
    with pytest.raises(
        KernelError, match=r"hopper_forward were not launched: cuLaunchKernelEx failed .* Force kernel='hopper'"
    ):
        launch(cuda.ForwardProblem(), 0x70)


def test_without_a_compiler_there_is_none(monkeypatch):
    def find(language):
        raise ToolchainError(f"no compiler for {language}")

    monkeypatch.setattr(toolchain, "find", find)
    assert not library.compiler_there()


# ---- which calls it takes --------------------------------------------------------------------------------------------


TAKEN = {  # by heads, queries and keys, and a mask
    **{f"{head}, {name}": (head, 8192, mask) for head in cuda.GROUPS for name, mask in (
        ("causal", CAUSAL), ("bottom right", bottom_right(8192, 8192)), ("a window", (program.BAND, -1024, 0)), ("no mask", ()),
    )},
    "64, short": (64, 512, CAUSAL),
    "64, short, no mask": (64, 512, ()),
    "64, a narrow window": (64, 8192, (program.BAND, -150, 0)),
    "128, short": (128, 384, CAUSAL),
    "256, short": (256, 512, CAUSAL),
}  # fmt: skip
OTHERS = {
    "shorter": (64, 511, CAUSAL),
    "a narrower window": (64, 8192, (program.BAND, -100, 0)),
    "128, shorter": (128, 383, CAUSAL),
    "128, shorter, no mask": (128, 1023, ()),
    "256, shorter, no mask": (256, 1023, ()),
    "256, a narrow window": (256, 8192, (program.BAND, -100, 0)),
}
REFUSED = {
    "other heads": lambda: arguments(*shaped((4, 2), 8192, 8192, 96, 96), mask=CAUSAL),
    "other values": lambda: arguments(*shaped((4, 2), 8192, 8192, 64, 128), mask=CAUSAL),
    "values of 256": lambda: arguments(*shaped((4, 2), 8192, 8192, 64, 256), mask=CAUSAL),
    "float32": lambda: arguments(*shaped((4, 2), 8192, 8192, 64, 64, torch.float32), mask=CAUSAL),
    "a soft cap": lambda: arguments(*shaped((4, 2), 8192, 8192, 64, 64), mask=CAUSAL, softcap=3.0),
    "sinks": lambda: arguments(*shaped((4, 2), 8192, 8192, 64, 64), mask=CAUSAL, sinks=torch.empty(4, device="meta")),
    "documents of 256 channels": lambda: arguments(
        *shaped((4, 2), 8192, 8192, 256, 256),
        mask=(program.SEGMENTS, 0, 1),
        masks=[torch.empty(2, 8192, dtype=torch.int32, device="meta")] * 2,
    ),
    "bools": lambda: arguments(
        *shaped((4, 2), 8192, 8192, 64, 64),
        mask=(program.DENSE, 0),
        masks=[torch.empty(2, 1, 8192, 8192, dtype=torch.bool, device="meta")],
    ),
    "dropout": lambda: arguments(*shaped((4, 2), 8192, 8192, 64, 64), mask=CAUSAL, dropout_p=0.5),
}


def call_of(head, length, mask):
    return AttentionCall(*arguments(*shaped((4, 2), length, length, head, head), mask=mask))


@pytest.mark.usefixtures("a_hopper")
class TestTakes:
    def test_these_and_no_shorter_ones(self):
        assert [case for case, call in (TAKEN | OTHERS).items() if cuda.takes(call_of(*call))] == [*TAKEN]

    def test_none_of_few_queries(self):
        assert not cuda.takes(AttentionCall(*arguments(*shaped((4, 2), 64, 8192, 64, 64), mask=bottom_right(64, 8192))))

    @pytest.mark.parametrize("head", [64, 128])
    def test_documents(self, head):
        ids = [torch.empty(2, 8192, dtype=torch.int32, device="meta")] * 2
        call = AttentionCall(
            *arguments(*shaped((4, 2), 8192, 8192, head, head), mask=(program.SEGMENTS, 0, 1), masks=ids)
        )
        assert cuda.takes(call)

    def test_no_shorter_documents(self):
        ids = [torch.empty(2, 1023, dtype=torch.int32, device="meta")] * 2
        call = AttentionCall(
            *arguments(*shaped((4, 2), 1023, 1023, 128, 128), mask=(program.SEGMENTS, 0, 1), masks=ids)
        )
        assert cuda.fits(call)
        assert not cuda.takes(call)

    def test_none_that_it_refuses(self):
        assert not unlike(REFUSED, lambda given: not cuda.takes(AttentionCall(*given)))

    @pytest.mark.parametrize(
        ("queries", "keys", "mask", "brief"),
        [
            (1024, 1024, (), True),
            (1025, 1025, (), False),
            (2048, 2048, CAUSAL, True),
            (2049, 2049, CAUSAL, False),
            (8192, 8192, (program.BAND, -1023, 0), True),
            (8192, 8192, (program.BAND, -1500, 0), False),
            (128, 8192, bottom_right(128, 8192), False),
        ],
    )
    def test_of_few_keys_steps_are_shorter(self, queries, keys, mask, brief):
        for head in cuda.GROUPS:
            call = AttentionCall(*arguments(*shaped((4, 2), queries, keys, head, head), mask=mask))
            assert cuda._brief(call) == (brief and head == 64)

    @pytest.mark.usefixtures("batch_invariance")
    def test_none_where_batch_invariance_is_asked_for(self):
        assert not cuda.takes(AttentionCall(*arguments(*shaped((4, 2), 8192, 8192, 64, 64), mask=CAUSAL)))

    def test_none_without_a_compiler(self, monkeypatch):
        monkeypatch.setattr(library, "compiler_there", lambda: False)
        assert not cuda.takes(AttentionCall(*arguments(*shaped((4, 2), 8192, 8192, 64, 64), mask=CAUSAL)))


def test_heads_are_interleaved_as_the_cache_holds():
    calls = (16, 512, 64), (16, 512, 128), (16, 1024, 128), (2, 8192, 128), (16, 512, 256)
    found = [cuda._section(*shaped((16, 16), length, length, head, head, batch=batch)) for batch, length, head in calls]
    assert found == [256, 32, 32, 8, 32]


def test_refuses():
    said = r"kernel 'hopper_cuda' does not take q, k, v of .* force kernel='hopper'"
    assert not unlike(REFUSED, refuses(cuda.forward, said))


# ---- numbers ---------------------------------------------------------------------------------------------------------

CALLS = {  # (batch, heads of queries and of keys, queries, keys), and what else
    "one tile": ((1, (1, 1), 192, 128), {}),
    "one tile, causal": ((1, (1, 1), 192, 192), {"mask": CAUSAL}),
    "tails": ((2, (4, 2), 333, 300), {}),
    "tails, causal": ((2, (4, 2), 300, 300), {"mask": CAUSAL}),
    "one query": ((1, (2, 1), 1, 77), {}),
    "one key": ((3, (5, 1), 129, 1), {}),
    "few queries, bottom right": ((1, (1, 1), 64, 2048), {"mask": bottom_right(64, 2048)}),
    "dead rows": ((1, (2, 2), 500, 70), {"mask": bottom_right(500, 70)}),
    "all rows dead": ((1, (2, 1), 200, 200), {"mask": (program.BAND, 1000, 2000)}),
    "window": ((2, (4, 1), 1000, 1000), {"mask": (program.BAND, -100, 0)}),
    "narrow window": ((1, (3, 3), 257, 777), {"mask": (program.BAND, 5, 40)}),
    "window far behind": ((1, (3, 3), 257, 777), {"mask": (program.BAND, -300, -200)}),
    "many tiles": ((8, (16, 4), 640, 640), {"mask": CAUSAL}),
    "many tiles of one step": ((8, (16, 4), 640, 100), {}),
    "a last section that is smaller": ((1, (140, 140), 300, 2048), {"mask": bottom_right(300, 2048)}),
    "heads inside": ((2, (4, 2), 300, 300), {"mask": CAUSAL, "out_is_bshd": True}),
    "another scale": ((2, (4, 2), 300, 300), {"mask": CAUSAL, "scale": 0.7}),
    "long": ((1, (2, 1), 4500, 4500), {"mask": CAUSAL}),
    "long, no mask": ((2, (4, 1), 1500, 2100), {}),
}


def compared_here(given):
    return compared(given, cuda.forward(*given))


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("case", CALLS)
class TestNumbers:
    pytestmark = on_hopper_with_compiler

    def test_are_the_references(self, case, dtype, head):
        (batch, heads, queries, keys), what = CALLS[case]
        inside = what.get("out_is_bshd", False)
        compared_here(arguments(*filled(batch, heads, queries, keys, head, head, dtype, inside), **what))


SEGMENTS = {  # queries, keys, a mask, and numbers of segments
    "documents": (1000, 1000, (program.SEGMENTS, 0, 1), [documents(2, 1000, 6)] * 2),
    "causal documents": (3000, 3000, (*CAUSAL, program.SEGMENTS, 0, 1, program.AND), [documents(1, 3000, 5)] * 2),
    "other keys": (333, 700, (program.SEGMENTS, 0, 1), [documents(2, 333, 3), documents(1, 700, 3, seed=1)]),
    "shuffled": (500, 777, (program.SEGMENTS, 0, 1), [shuffled(2, 500), shuffled(2, 777)]),
    "in order but for padding": (
        400,
        400,
        (*CAUSAL, program.SEGMENTS, 0, 1, program.AND),
        [padded(5, 100, 130, 120)] * 2,
    ),
    "far apart": (5000, 5000, (program.SEGMENTS, 0, 1), [packed(2000, 50, 2950)] * 2),
    "nothing in common": (300, 500, (program.SEGMENTS, 0, 1), [packed(300), packed(500) + 7]),
}


@pytest.mark.sweep
@pytest.mark.parametrize("channels", [64, 128])
@pytest.mark.parametrize("case", SEGMENTS)
class TestSegments:
    pytestmark = on_hopper_with_compiler

    def test_numbers_are_the_references(self, case, channels):
        queries, keys, mask, ids = SEGMENTS[case]
        given = arguments(
            *filled(2, (4, 2), queries, keys, channels, channels), mask=mask, masks=[x.cuda() for x in ids]
        )
        first = cuda.forward(*given)
        compared(given, first)
        assert all(map(torch.equal, first, cuda.forward(*given)))


class TestOnGpu:
    pytestmark = on_hopper_with_compiler

    @pytest.mark.sweep
    @pytest.mark.parametrize("mask", [CAUSAL, (program.BAND, -50, 0), bottom_right(300, 200), (program.BAND, -40, 30)])
    def test_hidden_keys_and_values_do_not_leak(self, head, mask):
        q, k, v = filled(1, (2, 1), 300, 300, head, head)
        for j in (3, 150, 299):
            k[:, :, j], v[:, :, j, ::3], v[:, :, j, 1] = float("nan"), float("inf"), float("nan")
        out, lse = cuda.forward(*(given := arguments(q, k, v, mask=mask)))
        expected, of_rows = reference.attention(*[x.double() if isinstance(x, torch.Tensor) else x for x in given])
        clean = expected.isfinite().all(-1)
        assert 0 < clean.sum() < clean.numel()
        torch.testing.assert_close(out[clean].double(), expected[clean], rtol=1e-2, atol=1e-2)
        assert out[~clean].isnan().any(-1).all()
        torch.testing.assert_close(lse.double(), of_rows, rtol=1e-5, atol=1e-4, equal_nan=True)

    @pytest.mark.parametrize("keys", [300, 500])  # small logits are visited after a tile of large ones, or after two
    def test_rounded_weights_that_overflow_before_a_greater_logit_comes(self, head, keys):
        compared_here(overflowing(head, "cuda", keys=keys))

    def test_padding_in_memory_does_not_leak(self, head):
        q, k, v = filled(2, (2, 2), 300, 400, head, head)
        k[:, :, 300:], v[:, :, 300:] = float("nan"), float("nan")
        for mask in ((), CAUSAL):
            compared_here(arguments(q, k[:, :, :300], v[:, :, :300], mask=mask))

    def test_strides_that_tma_cannot_follow_are_copied(self, head):
        _, _, v = filled(2, (4, 2), 200, 200, head, head)
        q = torch.randn(2, 4, head, 200, device="cuda").to(BF16).mT
        k = torch.randn(2, 2, 200, head + 3, device="cuda").to(BF16)[..., 3:]
        compared_here(arguments(q, k, v[:, :1].expand(2, 2, 200, head), mask=CAUSAL))

    def test_it_is_deterministic_and_leaves_the_counter_as_it_was(self, head):
        given = arguments(*filled(4, (16, 4), 700, 900, head, head), mask=CAUSAL)
        first = cuda.forward(*given)
        for _ in range(3):
            assert all(map(torch.equal, first, cuda.forward(*given)))
        torch.cuda.synchronize()
        assert all((counter == 0).all() for counter in gluon._known_counters.values())

    def test_streams_do_not_share_a_counter(self, head):
        given = [arguments(*filled(8, (16, 16), 1024, 1024, head, head), mask=CAUSAL) for _ in range(2)]
        alone = [cuda.forward(*each) for each in given]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in given]
        found = []
        for _ in range(8):
            for stream, each in zip(streams, given, strict=True):
                with torch.cuda.stream(stream):
                    found.append(cuda.forward(*each))
        torch.cuda.synchronize()
        for number, each in enumerate(found):
            assert all(map(torch.equal, alone[number % 2], each))

    def test_a_graph_can_be_captured(self, head):
        given = arguments(*filled(2, (4, 2), 300, 300, head, head), mask=CAUSAL)
        expected = cuda.forward(*given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = cuda.forward(*given)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, expected, found))

    def test_documents_get_it(self, head):
        q, k, v = filled(1, (2, 1), 2048, 2048, head, head)
        kernel = api.select(q, k, v, mask=Segments(packed(1000, 1048).cuda())).kernel
        assert kernel == ("hopper" if head == 256 else cuda.NAME)

    def test_long_calls_get_it(self, head):
        q, k, v = filled(1, (2, 1), 8192, 8192, head, head)
        assert api.select(q, k, v, mask=Causal()).kernel == cuda.NAME
        found = api.attention(q, k, v, mask=Causal())
        assert torch.equal(found, cuda.forward(*arguments(q, k, v, mask=CAUSAL))[0])

    def test_others_get_it_where_they_ask_for_it(self, head):
        q, k, v = filled(1, (2, 1), 200, 200, head, head)
        assert api.select(q, k, v, mask=Causal()).kernel == "hopper"
        found = api.attention(q, k, v, mask=Causal(), kernel=cuda.NAME)
        assert torch.equal(found, cuda.forward(*arguments(q, k, v, mask=CAUSAL))[0])
