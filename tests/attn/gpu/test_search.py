"""Tiles by search, on GPUs that no table was made for: when a search is made, what it tries, keeps and says. No GPU is needed."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from opkit.attn import gradients, reference
from opkit.attn.api import select
from opkit.attn.calls import BiasCall, Call, GradientCall
from opkit.attn.gpu import arguments, blocks, candidates, kernels, search
from opkit.attn.gpu.decode import decoding, division, plan
from opkit.attn.gpu.portable import bias, forward
from opkit.attn.program import AND, BAND, BIAS_DENSE, SEGMENTS
from opkit.errors import CompileError, KernelError, TuningWarning
from opkit.kernels.triton import compiling, observation, records, resources, tuning
from opkit.op import autotune
from opkit.op.triton.examples import request_for
from opkit.op.triton.launch import recording
from opkit.testing import Interpreter

sys.path.insert(0, str(Path(__file__).parent))
import candidate_kernels
from fake_gpu import TESTS, Gpu, imported, milliseconds, tiles

FAR = 2**62
CAUSAL = [BAND, -FAR, 0]
_driver = imported("opkit_fake_driver_of_attention", TESTS / "kernels" / "conftest.py")
fake_libraries, fake = _driver.fake_libraries, _driver.fake


@pytest.fixture
def gpu(fake, monkeypatch, tmp_path):
    made = Gpu(fake, monkeypatch, tmp_path)
    yield made
    made.restart()


def call(batch=1, heads=2, queries=600, d=64, keys=None, dtype=torch.bfloat16, mask=(), masks=(), biases=(), bias=()):
    q, k = (torch.zeros(batch, heads, n, d, dtype=dtype) for n in (queries, keys or queries))
    return Call(q, k, k, list(masks), list(biases), None, None, list(mask), list(bias), 0.1, 0.0, 0.0, False)


def tried(kernel, d=64, e=None, size=2, shared=166912, pair=0):
    return [tuple(each) for each in candidates.candidates(kernel, d, e or d, size, shared, pair)]


LABEL = "ROWS={}, KEYS={}, num_warps={}, num_stages={}"
FASTEST = min(tried(candidates.FORWARD), key=milliseconds)


def timed(gpu):
    return [tiles(request) for request in gpu.timed]


def launched(gpu, kernel="attention_forward"):
    return tiles(gpu.launches(kernel)[-1])


# ---- what is tried ---------------------------------------------------------------------------------------------------

KERNELS = (candidates.FORWARD, candidates.OF_KEYS, candidates.OF_QUERIES, candidates.OF_BIAS)


@pytest.mark.parametrize("shared", [65536, 101376, 166912, 232448])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_candidates_begin_with_the_table_s_own_and_have_room(kernel, shared):
    for d in (16, 64, 128, 256, 576):
        for size in (1, 2, 4):
            e = min(d, 512)
            found = candidates.candidates(kernel, d, e, size, shared, 0)
            assert found[0] == blocks.choose(kernel.rules, d, size, 4096, shared, kernel.tensors)
            assert len(set(found)) == len(found) <= candidates.MOST
            assert all(blocks.bytes_of(each, d, size, kernel.tensors, 0) <= shared for each in found[1:])
            for rows, keys, warps, stages in found:
                assert rows in (16, 32, 64, 128, 256)
                assert keys in (16, 32, 64, 128, 256)
                assert (warps in (4, 8), 1 <= stages <= 4) == (True, True)


def test_candidates_differ_in_each_way_and_spare_registers():
    found = tried(candidates.FORWARD, 128)
    assert found[:3] == [(128, 64, 8, 4), (128, 64, 8, 2), (64, 64, 4, 2)]
    assert {(64, 64, 8, 4), (128, 32, 8, 4), (128, 64, 4, 4), (128, 64, 8, 3)} <= set(found)
    assert (256, 64, 4, 2) not in found  # 384 sums a thread
    assert len(tried(candidates.FORWARD, 64, pair=4)) < len(tried(candidates.FORWARD, 64))


# ---- once ------------------------------------------------------------------------------------------------------------


def test_the_fastest_is_found_once_for_a_class_and_kept(gpu):
    kernels.forward(*call())
    assert timed(gpu) == tried(candidates.FORWARD)
    assert FASTEST == launched(gpu) != tried(candidates.FORWARD)[0]
    for other in (call(batch=3), call(heads=5), call(queries=1000), call(queries=1000, keys=77), call(d=40)):
        kernels.forward(*other)
        assert launched(gpu) == FASTEST
    assert len(gpu.timed) == len(tried(candidates.FORWARD))
    gpu.restart()
    kernels.forward(*call(queries=2000))
    assert launched(gpu) == FASTEST
    assert not gpu.timed
    (record,) = records.listed()
    assert (record.operator, record.kernel) == ("opkit::attention", "attention_forward")
    (entry,) = record.entries
    assert (entry.device, entry.bucket) == ("NVIDIA A100-SXM4-80GB", "bfloat16 | d=64 e=64 long=1 mask=0 pair=0")


def test_one_plan_asks_once(gpu, monkeypatch):
    run = kernels.forward.prepare(*call())
    run(*call())
    monkeypatch.setattr(search.Question, "ask", lambda *_: pytest.fail("asked again"))
    run(*call())
    assert len(gpu.launches("attention_forward")) == 2


@pytest.mark.parametrize(
    "other",
    [
        call(queries=512), call(dtype=torch.float16), call(dtype=torch.float32), call(d=128), call(mask=CAUSAL),
        call(mask=(SEGMENTS, 0, 0), masks=(torch.zeros(1, 600, dtype=torch.int32),)),
        call(bias=(BIAS_DENSE, 0), biases=(torch.zeros(1, 1, 600, 600, dtype=torch.bfloat16),)),
    ],
    ids=["few queries", "float16", "float32", "heads of 128", "causal", "documents", "bias"],
)  # fmt: skip
def test_other_classes_are_searched_apart(gpu, other):
    kernels.forward(*call())
    gpu.timed.clear()
    kernels.forward(*other)
    assert gpu.timed
    gpu.timed.clear()
    kernels.forward(*other._replace(q=other.q.repeat(1, 3, 1, 1)))
    assert not gpu.timed


def test_products_of_float32_by_torch_s_settings_are_two_classes(gpu, monkeypatch):
    for coarse, precision in ((False, "ieee"), (True, "tf32")):
        monkeypatch.setattr(search, "rounded", lambda coarse=coarse: coarse)
        gpu.timed.clear()
        kernels.forward(*call(dtype=torch.float32))
        assert {request.constexprs["PRECISION"] for request in gpu.timed} == {precision}
    assert {entry.bucket.split()[0] for entry in records.listed()[0].entries} == {"float32", "tf32"}


def test_few_queries_have_no_more_rows_than_they_need(gpu):
    kernels.forward(*call(queries=20))
    assert launched(gpu)[0] == 32
    assert len(set(timed(gpu))) == len(gpu.timed) < len(tried(candidates.FORWARD))  # what is cut alike is timed once
    gpu.timed.clear()
    kernels.forward(*call(queries=500))
    assert (gpu.timed, launched(gpu)[0] > 32) == ([], True)


def test_another_gpu_and_an_edited_kernel_are_searched_anew(gpu, monkeypatch):
    kernels.forward(*call())
    gpu.restart()
    gpu.become("NVIDIA L4", "sm_89", 101376)
    kernels.forward(*call())
    assert timed(gpu) == tried(candidates.FORWARD, shared=101376)
    gpu.restart()
    kernels.forward(*call())
    assert not gpu.timed
    edited = search.identity
    monkeypatch.setattr(search, "identity", lambda *named: dataclasses.replace(edited(*named), hash="edited"))
    gpu.restart()
    kernels.forward(*call())
    assert timed(gpu) == tried(candidates.FORWARD, shared=101376)


def test_the_hash_is_of_what_runs_on_the_gpu():
    names = [each for kernel in KERNELS for each in kernel.sources] + list(division.SOURCES)
    root = Path(search.__file__).parent
    assert all((root / name).is_file() for name in names)
    hashes = {search.identity(each.name, each.sources).hash for each in KERNELS}
    assert len(hashes) == 3  # both kernels of the backward are in one file


def test_a_damaged_record_is_searched_again(gpu):
    kernels.forward(*call())
    records.file_of("opkit::attention", "attention_forward").write_text("{")
    gpu.restart()
    with pytest.warns(TuningWarning, match="is not used, and it is measured again"):
        kernels.forward(*call())
    assert timed(gpu) == tried(candidates.FORWARD)


def test_results_are_taken_to_another_machine(gpu, tmp_path, monkeypatch):
    kernels.forward(*call())
    records.export_all(tmp_path / "there" / "a100.json")
    records.file_of("opkit::attention", "attention_forward").unlink()
    gpu.restart()
    monkeypatch.setattr(search, "_folders", lambda: (tmp_path / "there",))  # as where opkit's package has them
    kernels.forward(*call())
    assert (gpu.timed, launched(gpu)) == ([], FASTEST)


def test_results_may_lie_in_opkit_s_own_package():
    assert Path(search.__file__).parents[2] / "_opkit" / "tuning" in search._folders()


# ---- where nothing is timed ------------------------------------------------------------------------------------------


def test_nothing_is_timed_while_a_graph_is_captured(gpu, monkeypatch):
    run = kernels.forward.prepare(*call())
    monkeypatch.setattr(autotune, "capturing", lambda: True)
    with pytest.warns(TuningWarning, match=r"attention_forward.* cannot be while a CUDA graph is captured.*ROWS=128"):
        run(*call())
    run(*call())
    assert (gpu.timed, launched(gpu)) == ([], tried(candidates.FORWARD)[0])
    monkeypatch.setattr(autotune, "capturing", lambda: False)
    run(*call())
    assert (len(gpu.timed), launched(gpu)) == (len(tried(candidates.FORWARD)), FASTEST)
    monkeypatch.setattr(autotune, "capturing", lambda: True)
    kernels.forward(*call(batch=7))
    assert launched(gpu) == FASTEST


def test_a_captured_call_takes_the_tiles_of_similar_ones(gpu, monkeypatch):
    kernels.forward(*call())
    monkeypatch.setattr(autotune, "capturing", lambda: True)
    with pytest.warns(TuningWarning, match=r"the configuration for bfloat16 \| d=64 e=64 long=1 mask=0"):
        kernels.forward(*call(mask=CAUSAL))
    assert launched(gpu) == FASTEST


def test_switched_off(gpu, monkeypatch):
    gpu.settings(tune=False)
    run = kernels.forward.prepare(*call())
    run(*call())
    assert (gpu.timed, launched(gpu)) == ([], tried(candidates.FORWARD)[0])
    monkeypatch.setattr(search.Question, "ask", lambda *_: pytest.fail("asked again"))
    run(*call())


def test_nothing_is_timed_while_launches_are_recorded_or_traced(gpu):
    with recording() as found:
        kernels.forward(*call())
    assert [values.bound.kernel.name for values in found] == ["attention_forward"]
    question = arguments.question_of(candidates.FORWARD, call(), arguments.shape_of(call()))
    with torch.utils._python_dispatch.TorchDispatchMode():
        choice = question.ask(lambda config: pytest.fail("timed"))
    assert (choice.source, gpu.timed) == ("first", [])


def test_of_the_gpus_that_tables_were_made_on_nothing_is_asked(gpu, monkeypatch):
    gpu.become("NVIDIA H200", "sm_90", 232448)
    monkeypatch.setattr(search.Question, "ask", lambda *_: pytest.fail("asked"))
    given = call()
    kernels.forward(*given)
    assert launched(gpu) == (128, 128, 8, 3)
    kernels.backward(*gradient_call(given))
    assert launched(gpu, "attention_of_keys") == (64, 64, 4, 2)
    assert launched(gpu, "attention_of_queries") == (64, 64, 4, 3)
    decoding.decode(*call(queries=1, keys=8192))
    assert (gpu.timed, records.listed()) == ([], [])


SHIPPED = {
    candidates.FORWARD: [(128, 128, 8, 3), (128, 64, 8, 4), (64, 64, 8, 2), (64, 32, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2)],
    candidates.OF_KEYS: [(64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (16, 32, 8, 1), (32, 32, 4, 1), (32, 32, 4, 1)],
    candidates.OF_QUERIES: [(64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 8, 1), (32, 16, 8, 1), (32, 32, 4, 1), (32, 32, 4, 1)],
    candidates.OF_BIAS: [(64, 64, 4, 1), (64, 64, 4, 1), (64, 64, 8, 1), (32, 16, 8, 1), (32, 32, 4, 1), (32, 32, 4, 1)],
}  # fmt: skip
"""Of an H200, for heads of 64, 128, 256 and 576 in two bytes, and of 64 and 128 in four."""


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_the_shipped_tables_stay_what_they_are(kernel):
    heads = ((64, 2), (128, 2), (256, 2), (576, 2), (64, 4), (128, 4))
    found = [tuple(blocks.choose(kernel.rules, d, size, 4096, 232448, kernel.tensors)) for d, size in heads]
    assert found == SHIPPED[kernel]


def test_batch_invariance_is_never_searched_for(gpu, monkeypatch):
    monkeypatch.setattr(search.Question, "ask", lambda *_: pytest.fail("asked"))
    given = call()
    forward.forward(given, ordered=True)(*given)
    assert launched(gpu) == tuple(blocks.invariant(64, 2, 232448))


# ---- all kernels -----------------------------------------------------------------------------------------------------


def gradient_call(given):
    lse = torch.zeros(given.q.shape[:3])
    rest = given.mask_tensors, given.bias_tensors, given.mask, given.bias, 0.1, 0.0
    return GradientCall(given.q, None, given.q, given.k, given.v, given.q, lse, *rest, False)


def test_both_kernels_of_the_backward(gpu):
    kernels.backward(*gradient_call(call()))
    expected = {each: tried(each) for each in (candidates.OF_KEYS, candidates.OF_QUERIES)}
    assert timed(gpu) == [each for found in expected.values() for each in found]
    for kernel, found in expected.items():
        assert launched(gpu, kernel.name) == min(found, key=milliseconds)
    gpu.timed.clear()
    kernels.backward(*gradient_call(call(batch=2, queries=900)))
    assert not gpu.timed


def test_lists_of_tiles_have_the_chosen_tiles(gpu, monkeypatch):
    from opkit.attn.gpu import tile_lists

    built = []
    monkeypatch.setattr(tile_lists, "lists_of", lambda call, shape, size, by_keys: built.append(size) or _no_lists())
    given = call(mask=(SEGMENTS, 0, 0, *CAUSAL, AND), masks=(torch.zeros(1, 600, dtype=torch.int32),))
    kernels.forward(*given)
    assert [tuple(each) for each in built[:-1]] == tried(candidates.FORWARD)
    assert tuple(built[-1]) == launched(gpu) == FASTEST


def _no_lists():
    return torch.zeros(1, 1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 2, dtype=torch.int32)


def test_gradients_of_biases(gpu):
    given = call(bias=(BIAS_DENSE, 0), biases=(torch.zeros(1, 2, 600, 600, dtype=torch.bfloat16),))
    lse = torch.zeros(given.q.shape[:3])
    rest = given.mask_tensors, given.bias_tensors, given.mask, given.bias, 0.1, 0.0
    bias_call = BiasCall(given.q, lse, given.q, given.k, given.v, lse, *rest, [0])
    (found,) = kernels.bias_backward(*bias_call)
    assert found.shape == (1, 2, 600, 600)
    assert timed(gpu) == tried(candidates.OF_BIAS, pair=2)
    assert launched(gpu, "attention_of_bias")[1] == 32
    assert bias.backward(bias_call)(*bias_call)[0].shape == found.shape


def test_decoding(gpu):
    gpu.clock = lambda request: abs(request.constexprs.get("BLOCK", 0) - 32)
    given = call(heads=8, queries=1, keys=8192)
    decoding.decode(*given)
    (entry,) = next(record.entries for record in records.listed() if record.kernel == "decode")
    assert len(entry.tried) == len(plan.CHANGES)
    gpu_seen = decoding.device_of(-1)
    shape = decoding.shape_of(given, decoding.numbers_of(-FAR, FAR, 0.1, 0.0), False)
    chosen = plan.blocks_of(shape, gpu_seen, division.change_of(_config(entry.best)))
    sizes = [plan.blocks_of(shape, gpu_seen, change).block for change in plan.CHANGES]
    assert sizes[0] != chosen.block == min(sizes, key=lambda block: abs(block - 32))
    last = gpu.launches("decode")[-1]
    assert (last.constexprs["BLOCK"], last.options["num_warps"]) == (chosen.block, chosen.warps)
    gpu.timed.clear()
    decoding.decode(*call(batch=2, heads=8, queries=1, keys=9000))
    assert not gpu.timed


def _config(found):
    return tuning.Config(found.config["constexprs"], found.config["options"])


@pytest.mark.parametrize("gpu_of", [(108, 166912), (58, 101376), (304, 65536)], ids=["A100", "L4", "MI300X"])
@pytest.mark.parametrize(
    "shape", [(4, 8, 8192, 128), (64, 8, 8192, 128), (128, 4, 4096, 256), (1, 2, 300, 64)], ids=str
)
def test_changes_of_a_division_have_room(shape, gpu_of):
    device = plan.Device(*gpu_of, False, "tf32x3")
    height, heads, keys, d = shape
    asked = plan.Shape(height, heads, keys, d, d, 2, 2)
    found = [plan.blocks_of(asked, device, change) for change in plan.CHANGES]
    assert found[0] == plan.blocks_of(asked, device)
    assert len(set(found)) >= 3
    for rows, block, stages, warps, splits in found:
        assert rows == found[0].rows
        assert block in (16, 32, 64, 128)
        assert warps in (1, 2, 4, 8)
        assert splits >= 1
        assert stages >= 1
        buffers = stages - (rows <= 32)
        assert buffers <= 1 or rows * d * 2 + buffers * block * 2 * d * 2 <= device.shared


# ---- candidates that cannot run --------------------------------------------------------------------------------------


class OutOfResources(Exception):
    """Named as Triton's."""


def test_a_candidate_that_does_not_compile_or_has_no_room_is_passed_over(gpu):
    def refuse(request):
        if tiles(request)[1] == 32:
            raise CompileError("no such layout")
        if tiles(request)[2] == 4:
            raise OutOfResources("shared memory")

    gpu.refuse = refuse
    kernels.forward(*call())
    chosen = launched(gpu)
    assert chosen == min((each for each in tried(candidates.FORWARD) if each[1] > 32 and each[2] > 4), key=milliseconds)
    skipped = {each.label: each.skipped for each in records.listed()[0].entries[0].tried if each.ms is None}
    assert skipped[LABEL.format(*FASTEST)] == "it does not compile: no such layout"
    assert "out of resources: shared memory" in skipped.values()
    gpu.restart()
    kernels.forward(*call())
    assert (gpu.timed, launched(gpu)) == ([], chosen)


def test_no_candidate_at_all(gpu):
    def refuse(request):
        raise CompileError("this GPU is unknown")

    gpu.refuse = refuse
    with pytest.raises(KernelError, match=r"none of its \d+ configurations can run .*\n.*this GPU is unknown"):
        kernels.forward(*call())


# ---- in advance ------------------------------------------------------------------------------------------------------


def test_what_runs_already_is_asked_again_when_it_is_tuned(gpu):
    run = kernels.forward.prepare(*call())
    run(*call())
    gpu.timed.clear()
    with observation.observed() as choices:
        run(*call())
    assert ([choice.source for choice in choices], gpu.timed) == (["tuned"], [])
    with observation.observed(force=True) as choices:
        run(*call())
    assert timed(gpu) == tried(candidates.FORWARD)
    assert choices[0].config.label == LABEL.format(*FASTEST)


EXAMPLES = {
    "attention": kernels.forward, "decoding": decoding.decode, "backward": kernels.backward,
    "biases": kernels.bias_backward,
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_opkit_tune_has_calls_that_these_kernels_take(name):
    from opkit.attn.operator import attention_operator
    from opkit.op import tuning as in_advance
    from opkit.op import typical_calls

    ops = {
        "backward": gradients.backward_operator, "biases": gradients.bias_backward_operator,
    }  # fmt: skip
    op = ops.get(name, attention_operator)()
    function = EXAMPLES[name]
    assert isinstance(function, in_advance.Tunable)
    listed = {str(each) for each in in_advance.calls(op)}
    for spec in typical_calls.given(op._operator, function.examples):
        assert str(spec) in listed
        positional, named = typical_calls.arguments_of(op._operator, spec, "meta")
        with recording() as launches:
            function(*positional, **named)
        assert launches
    assert all((each.operator, each.kernel) in in_advance.identities() for each in function.identities())


def test_opkit_tune_searches(gpu, monkeypatch):
    from typer.testing import CliRunner

    from opkit import cli
    from opkit.op import tuning as in_advance

    monkeypatch.setattr(in_advance, "device", lambda: "cpu")
    shape = ", ".join(f"{name}=bf16[1, 2, 600, 64]" for name in "qkv")
    shape += ", mask_tensors=[], bias_tensors=[], sinks=None, seed=None, mask=[], bias=[]"
    shape = f"opkit::attention({shape}, scale=0.1, softcap=0.0, dropout_p=0.0, heads_inside=False)"
    undo = kernels_on_cpu()
    try:
        result = CliRunner().invoke(cli.app, ["tune", "opkit.attn.api", "--shapes", shape])
        assert result.exit_code == 0, result.output
        assert "[attention_forward]: " + LABEL.format(*FASTEST) in " ".join(result.output.split())
        assert "(tuned)" in result.output
        gpu.restart()
        assert "(recorded)" in CliRunner().invoke(cli.app, ["tune", "opkit.attn.api", "--shapes", shape]).output
        shown = CliRunner().invoke(cli.app, ["tune", "--show", "--op", "opkit::attention"]).output
        assert "attention_forward" in shown
    finally:
        undo()


def kernels_on_cpu():
    """The portable forward takes calls of CPU tensors; gives what undoes it."""
    from opkit.attn.operator import attention_operator

    table = attention_operator()._operator.kernels
    before = list(table.kernels)
    own = next(each for each in before if each.name == "triton")
    table.kernels = [dataclasses.replace(own, device="cpu", priority=100), *(k for k in before if k is not own)]
    attention_operator()._renew()

    def undo():
        table.kernels = before
        attention_operator()._renew()

    return undo


def test_select_says_which_tiles_and_why(gpu):
    undo = kernels_on_cpu()
    try:
        q = call(queries=600).q
        (note,) = select(q, q, q).notes
        assert note.startswith(
            "attention_forward: rows=128, keys=128, warps=8, stages=3 (not searched for yet, so by rule"
        )
        assert not gpu.timed
        kernels.forward(*call())
        chosen = select(q, q, q)
        assert "rows={}, keys={}, warps={}, stages={} (the fastest by search".format(*FASTEST) in str(chosen)
        assert "for bfloat16 | d=64 e=64 long=1 mask=0 pair=0 on NVIDIA A100-SXM4-80GB)" in str(chosen)
        (note,) = select(q, q, q, bias=torch.zeros(1, 1, 600, 600)).notes
        assert "not searched for yet" in note
        gpu.become("NVIDIA H200", "sm_90", 232448)
        assert select(q, q, q).notes == ("attention_forward: rows=128, keys=128, warps=8, stages=3 (by its table)",)
    finally:
        undo()


# ---- processes -------------------------------------------------------------------------------------------------------

CHILD = """
import sys, time
from opkit.attn.gpu import search
from opkit.kernels.triton.configs import Config
configs = tuple(Config({"ROWS": rows}) for rows in (32, 64, 128))
def measure(each):
    print("measuring", each.constexprs["ROWS"], flush=True)
    time.sleep(0.2)
    return abs(each.constexprs["ROWS"] - 64)
print("ready", flush=True); sys.stdin.readline()
asked = search.Question(search.identity("attention_forward", ("device/tile.py",)), configs, "NVIDIA A100", "bfloat16 | d=64")
print("chosen", asked.ask(measure).config.constexprs["ROWS"], flush=True)
"""


def test_of_two_processes_one_searches(tmp_path):
    import os

    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    given = os.environ | {"OPKIT_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    both = [subprocess.Popen([sys.executable, "-c", CHILD], env=given, **pipes) for _ in range(2)]
    assert [each.stdout.readline() for each in both] == ["ready\n"] * 2
    outputs = [each.stdin.write("\n") and each.stdin.flush() for each in both]
    outputs = sorted((each.communicate(timeout=120) for each in both), key=lambda said: len(said[0]))
    assert not any("Traceback" in said[1] for said in outputs), outputs
    assert outputs[0][0].splitlines() == ["chosen 64"]
    assert outputs[1][0].splitlines() == ["measuring 32", "measuring 64", "measuring 128", "chosen 64"]


# ---- what candidates compute, and that they compile ------------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreted():
    with Interpreter("candidate_kernels", candidate_kernels.__file__) as process:
        yield process


def made(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).half() for shape in shapes]


def close(found, exact, bound=4e-3):
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=bound * max(exact.abs().max().item(), 1e-3))


def test_each_candidate_computes_the_same(interpreted):
    q, k, v = made((1, 2, 150, 64), (1, 1, 130, 64), (1, 1, 130, 64))
    exact, exact_lse = reference.attention(*candidate_kernels.call_of(q.double(), k.double(), v.double()))
    for number, _ in enumerate(candidate_kernels.candidates_of(candidates.FORWARD, 64, torch.float16)):
        out, lse = interpreted("candidate_tests::forward", q, k, v, number, kernel="interpreted")
        close(out, exact)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-3, atol=1e-3)


def test_each_candidate_computes_the_same_gradients(interpreted):
    gradient, q, k, v = made((1, 2, 150, 64), (1, 2, 150, 64), (1, 1, 130, 64), (1, 1, 130, 64))
    out, lse = reference.attention(*candidate_kernels.call_of(q.double(), k.double(), v.double()))
    given = gradient.double(), q.double(), k.double(), v.double(), out, lse
    exact = gradients.attention_backward(*candidate_kernels.gradient_call_of(*given))
    counts = [len(candidate_kernels.candidates_of(each, 64, torch.float16)) for each in KERNELS[1:3]]
    for number in range(max(counts)):
        args = (gradient, q, k, v, out.half(), lse.float(), number)
        found = interpreted("candidate_tests::backward", *args, kernel="interpreted")
        for mine, right in zip(found, exact, strict=True):
            close(mine, right, 1e-2)


COMPILED = {
    ("sm_80", 166912): (candidates.OF_KEYS, 64),
    ("sm_100", 232448): (candidates.OF_BIAS, 64),
    ("gfx942", 65536): (candidates.FORWARD, 64),
}


@pytest.mark.parametrize(("target", "shared"), COMPILED)
def test_candidates_compile(target, shared, monkeypatch):
    kernel, d = COMPILED[target, shared]
    for size in candidates.candidates(kernel, d, d, 2, shared, 0):
        monkeypatch.setattr(arguments, "tiles_of", lambda *_, size=size: search.Tiles(None, lambda _: size))
        (launch,) = [each for each in _launches(d) if each.bound.kernel.name == kernel.name]
        assert resources.of(compiling.build(request_for(launch, None, target))).shared <= shared


def _launches(d):
    """What a causal forward and its backward, with a bias, launch for heads of so many elements."""
    q, lse = torch.empty(2, 4, 1024, d, dtype=torch.bfloat16, device="meta"), torch.empty(2, 4, 1024, device="meta")
    added = [torch.empty(1, 4, 1024, 1024, dtype=torch.bfloat16, device="meta")]
    with recording() as found:
        kernels.forward(q, q, q, [], [], None, None, CAUSAL, [], 0.1, 0.0, 0.0, False)
        kernels.backward(q, None, q, q, q, q, lse, [], [], CAUSAL, [], 0.1, 0.0, False)
        kernels.bias_backward(q, lse, q, q, q, lse, [], added, CAUSAL, [BIAS_DENSE, 0], 0.1, 0.0, [0])
    return found


def test_changes_of_a_division_compile(monkeypatch):
    a100 = plan.Device(108, 166912, False, "tf32x3")
    monkeypatch.setattr(decoding, "device_of", lambda index: a100)
    q, k = (torch.empty(1, heads, n, 128, dtype=torch.bfloat16, device="meta") for heads, n in ((32, 1), (8, 8192)))
    found = {}
    for change in plan.CHANGES:
        monkeypatch.setattr(decoding, "blocks_of", lambda shape, gpu, change=change: plan.blocks_of(shape, gpu, change))
        with recording() as launches:
            decoding.decode(q, k, k, [], [], None, None, [], [], 0.1, 0.0, 0.0, False)
        request = request_for(launches[0], None, "sm_80")
        found[str(request)] = request
    assert len(found) > 4
    for request in found.values():
        assert resources.of(compiling.build(request)).shared <= a100.shared
