"""The kernels for sm_90a in CUDA C++ compile as they must, by NVRTC and nvcc; on such a GPU, the forward's numbers are right."""

import ctypes
import dataclasses
import re
import subprocess
from pathlib import Path

import pytest
import torch
from fake_gpu import imported
from function_calls import call_of
from hopper_backward_calls import arguments as backward_arguments
from hopper_calls import (
    BF16,
    CAUSAL,
    FP16,
    SHARED,
    arguments,
    bottom_right,
    compared,
    compared_where_hidden,
    filled,
    hide,
    on_hopper_with_compiler,
    overflowing,
    refuses,
    shaped,
    unlike,
)
from hopper_masks import documents, packed, padded, shuffled

from opkit.attn import api
from opkit.attn.calls import AttentionCall, GradientCall
from opkit.attn.gpu.hopper import backward_cuda, backward_kinds, calls, decode_cuda, forward_kinds, library
from opkit.attn.gpu.hopper import forward_cuda as cuda
from opkit.attn.masks import program
from opkit.errors import KernelError, ToolchainError
from opkit.kernels.cc import build_plan, processes, toolchain
from opkit.masks import Causal, Segments

_fixtures = imported("opkit_fake_driver_of_cuda", Path(__file__).parents[2] / "kernels" / "conftest.py")
fake_libraries, fake = _fixtures.fake_libraries, _fixtures.fake
OF_FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]

# ---- compiled --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["nvrtc", "nvcc"])
def compiler(request, settings):
    """A compiler of CUDA C++, which the settings choose."""
    settings(cuda_compiler=request.param)
    if not library.compiler_there():
        pytest.skip(f"needs {request.param}")
    return request.param


def resources(name, dtype, folder, defined=""):
    """Of each kernel, as ptxas says: registers, and bytes of them that a thread stores to memory, and loads."""
    request = library.request(name, dtype, defined)
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
    assert made["problem"] == (ctypes.sizeof(problem[name]),)
    assert {kernel for kernel, *_ in found} == made.keys() - {"problem"}
    assert all(numbers[1] <= SHARED for kernel, numbers in made.items() if kernel != "problem")
    return {kernel: (int(registers), int(stored), int(loaded)) for kernel, stored, loaded, registers in found}


MASKS = {
    "bools": (program.DENSE, 0),
    "not these documents, or near": (program.SEGMENTS, 0, 1, program.NOT, program.BAND, -30, 30, program.OR),
    "a diagonal of each query": (program.BAND_AT, 0, -20, 20),
}
KINDS = {  # registers before these are shared out, heads of queries and of values, queries and keys, a mask, and what else
    "few queries": (168, 64, 64, 128, (), {}),
    "few keys": (96, 64, 64, 1024, CAUSAL, {}),
    "64": (128, 64, 64, 8192, (), {}),
    "64, causal": (128, 64, 64, 8192, CAUSAL, {}),
    "64, causal, sinks": (128, 64, 64, 8192, CAUSAL, {"sinks": True}),
    "64, a cap": (128, 64, 64, 8192, CAUSAL, {"softcap": 30.0}),
    "64, documents": (96, 64, 64, 8192, (program.SEGMENTS, 0, 1), {}),
    "128": (168, 128, 128, 8192, (), {}),
    "128, causal": (168, 128, 128, 8192, CAUSAL, {}),
    "128, causal, sinks, a cap": (168, 128, 128, 8192, CAUSAL, {"sinks": True, "softcap": 30.0}),
    "128, lengths": (168, 128, 128, 8192, (program.LENGTH, 0), {}),
    "128, documents": (168, 128, 128, 8192, (program.SEGMENTS, 0, 1), {}),
    "96, causal": (168, 96, 96, 8192, CAUSAL, {}),
    "192 and 128, causal": (168, 192, 128, 8192, CAUSAL, {}),
    "160 and 200": (168, 160, 200, 8192, (), {}),
    "256": (168, 256, 256, 8192, (), {}),
    "256, causal, few keys": (168, 256, 256, 300, CAUSAL, {}),
    "256, causal, a cap": (168, 256, 256, 8192, CAUSAL, {"softcap": 30.0}),
    **{f"{head}, {name}": (168, head, head, 8192, mask, {}) for head in (64, 128, 256) for name, mask in MASKS.items()},
}


def definitions(head, columns, length, mask, sinks=False, softcap=0.0, heads=(256, 256)):
    sunk = torch.empty(heads[0], device="meta") if sinks else None
    given = arguments(*shaped(heads, length, length, head, columns), mask=mask, sinks=sunk, softcap=softcap)
    return forward_kinds.kind_of(AttentionCall(*given)).definitions


@pytest.mark.build
@pytest.mark.sweep(keep=["64, causal", "128, causal, sinks, a cap", "256, bools"])
@pytest.mark.parametrize("case", KINDS)
@pytest.mark.usefixtures("compiler")
def test_the_forward_compiles_without_spills(case, tmp_path, record_property):
    registers, *sizes, what = KINDS[case]
    found = resources("forward", BF16, tmp_path, definitions(*sizes, **what))
    record_property("resources", str(found))
    assert found.keys() == {"attention"}
    used, stored, loaded = found["attention"]
    assert used == registers
    assert max(stored, loaded) <= (124 if case == "64, a cap" else 0)  # bytes of a thread; it was timed with them


@pytest.mark.build
@pytest.mark.parametrize("head", [64, 128, 256])
@pytest.mark.parametrize("dtype", OF_FLOAT8, ids=str)
@pytest.mark.usefixtures("compiler")
def test_the_forward_of_float8_compiles_without_spills(dtype, head, tmp_path, record_property):
    found = resources("forward", dtype, tmp_path, definitions(head, head, 8192, CAUSAL))
    record_property("resources", str(found))
    assert found.keys() == {"attention", "widen_values"}
    assert all(stored == loaded == 0 for _, stored, loaded in found.values())


SCORE = call_of("soft cap and more", BF16).bias
BACKWARD_KINDS = {  # the most bytes that a thread puts aside, heads of queries and of values, a mask, and what else
    "64": (120, 64, 64, (), {}),
    "64, causal": (140, 64, 64, CAUSAL, {}),
    "64, causal, a cap": (400, 64, 64, CAUSAL, {"softcap": 30.0}),
    "128": (140, 128, 128, (), {}),
    "128, causal": (300, 128, 128, CAUSAL, {}),
    "128, causal, a cap": (400, 128, 128, CAUSAL, {"softcap": 30.0}),
    "128, lengths": (300, 128, 128, (program.LENGTH, 0), {}),
    "128, documents": (560, 128, 128, (program.SEGMENTS, 0, 1), {}),
    "96, causal": (300, 96, 96, CAUSAL, {}),
    "192 and 128, causal": (300, 192, 128, CAUSAL, {}),
    "160": (300, 160, 160, (), {}),
    "256": (300, 256, 256, (), {}),
    "256, causal, a cap": (300, 256, 256, CAUSAL, {"softcap": 30.0}),
    "256, documents": (400, 256, 256, (program.SEGMENTS, 0, 1), {}),
    **{f"{head}, a function": (400, head, head, CAUSAL, {"bias": SCORE}) for head in (64, 128, 256)},
    **{f"{head}, one tile": (500, head, head, CAUSAL, {"length": 64}) for head in (64, 128, 256)},
    **{f"{head}, {name}": (700, head, head, mask, {}) for head in (64, 128, 256) for name, mask in MASKS.items()},
}


@pytest.mark.build
@pytest.mark.parametrize("ordered", [False, True], ids=["", "in order"])
@pytest.mark.sweep(keep=["64, causal", "128, causal, a cap", "128, a function", "192 and 128, causal", "256, bools"])
@pytest.mark.parametrize("case", BACKWARD_KINDS)
@pytest.mark.usefixtures("compiler")
def test_the_backward_compiles_with_few_spills(case, ordered, tmp_path, record_property):
    spills, head, columns, mask, what = BACKWARD_KINDS[case]
    length = what.get("length", 8192)
    what = {name: each for name, each in what.items() if name != "length"}
    given = backward_arguments(*shaped((256, 256), length, length, head, columns), mask=mask, **what)
    defined = backward_kinds.kind_of(GradientCall(*given), ordered).definitions
    found = resources("backward", BF16, tmp_path, defined)
    record_property("resources", str(found))
    assert found.keys() == {"rows", "gradients", "after_products"}
    registers, stored, loaded = found["gradients"]
    assert registers == 168
    spills += 96 * ordered  # the turns of gradients that are added in order
    assert max(stored, loaded) <= spills  # of those that load, and of what is done once for a tile, most
    assert all(max(each[1:]) <= 64 for kernel, each in found.items() if kernel != "gradients")


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
    defined = definitions(128, 128, 300, CAUSAL)
    kernels = library.kernels("forward", BF16, defined)
    assert set(kernels.numbers) == {"attention", "problem"}
    monkeypatch.setattr(processes, "run", None)
    library.kernels.cache_clear()
    assert library.kernels("forward", BF16, defined).numbers == kernels.numbers  # from the cache


def test_a_launch_that_fails_raises(fake, monkeypatch):
    monkeypatch.setattr(library, "_driver", lambda: fake.driver)
    monkeypatch.setattr(library, "_numbers_in", lambda image: {"attention": (384, 200_000)})
    kernels = library.Kernels("forward", BF16, b"image")
    launch = kernels.launching([library.Step("attention", (7, 1, 1), early=True)], [], cuda.ForwardProblem, 0)
    launch(cuda.ForwardProblem(), 0x70)
    assert fake.launches[-1][1:7] == ["attention", "7,1,1", "384,1,1", "200000", "0x70", "6=1,0,0"]
    fake.fail("cuLaunchKernelEx", 701)
    with pytest.raises(
        KernelError, match=r"hopper_forward were not launched: cuLaunchKernelEx failed .* Force kernel='triton'"
    ):
        launch(cuda.ForwardProblem(), 0x70)


def test_without_a_compiler_there_is_none(monkeypatch):
    def find(language):
        raise ToolchainError(f"no compiler for {language}")

    monkeypatch.setattr(toolchain, "find", find)
    assert not library.compiler_there()


# ---- which calls it takes --------------------------------------------------------------------------------------------


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


@pytest.mark.usefixtures("a_hopper")
class TestTakes:
    def test_what_it_does_not_refuse(self):
        call = AttentionCall(*arguments(*shaped((4, 2), 8, 8, 72, 200), mask=CAUSAL, softcap=3.0))
        assert cuda.takes(call)
        assert not unlike(REFUSED, lambda given: not cuda.takes(AttentionCall(*given)))

    @pytest.mark.usefixtures("batch_invariance")
    def test_none_where_batch_invariance_is_asked_for(self):
        assert not cuda.takes(AttentionCall(*arguments(*shaped((4, 2), 8192, 8192, 64, 64), mask=CAUSAL)))

    def test_none_without_a_compiler(self, monkeypatch):
        monkeypatch.setattr(library, "compiler_there", lambda: False)
        assert not cuda.takes(AttentionCall(*arguments(*shaped((4, 2), 8192, 8192, 64, 64), mask=CAUSAL)))


def test_takes_nothing_that_is_not_on_such_a_gpu():
    assert not cuda.takes(AttentionCall(*arguments(*shaped((4, 2), 8, 8, 64, 64, device="cpu"))))


def test_refuses():
    said = r"kernel 'hopper_cuda' does not take q, k, v of .* Leave the choice"
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
@pytest.mark.parametrize("channels", [64, 128, 256])
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
        hide(k, v)
        compared_where_hidden(arguments(q, k, v, mask=mask))

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
        assert all((counter == 0).all() for counter in calls._known_counters.values())

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

    def test_calls_get_it(self, head):
        for length, mask in ((200, Causal()), (2048, Segments(packed(1000, 1048).cuda()))):
            q, k, v = filled(1, (2, 1), length, length, head, head)
            assert api.select(q, k, v, mask=mask).kernel == cuda.NAME
        q, k, v = filled(1, (2, 1), 8192, 8192, head, head)
        found = api.attention(q, k, v, mask=Causal())
        assert torch.equal(found, cuda.forward(*arguments(q, k, v, mask=CAUSAL))[0])
