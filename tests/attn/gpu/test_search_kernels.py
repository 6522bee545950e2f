"""Tiles by search: each kernel of attention, candidates that cannot run, and searches in advance. No GPU is needed."""

import dataclasses
from typing import NamedTuple

import fake_gpu
import pytest
import torch
from fake_gpu import CAUSAL, FAR, FASTEST, LABEL, call, gradient_call, launched, milliseconds, tiles, timed, tried

from opkit import config
from opkit.attn import gradients, reference
from opkit.attn.api import select
from opkit.attn.calls import AttentionCall, BiasCall
from opkit.attn.gpu import blocks, kernels, search
from opkit.attn.gpu.decode import decoding, launches, plan
from opkit.attn.gpu.portable import backward
from opkit.attn.masks.program import AND, BIAS_DENSE, SEGMENTS
from opkit.errors import CompileError, KernelError
from opkit.kernels.tuning import observation, records, tuning
from opkit.masks import Causal
from opkit.op.triton.launch import recording

fake_libraries, fake, gpu = fake_gpu.fake_libraries, fake_gpu.fake, fake_gpu.gpu


# ---- all kernels -----------------------------------------------------------------------------------------------------


def test_both_kernels_of_the_backward(gpu):
    kernels.backward(*gradient_call(call()))
    expected = {each: tried(each) for each in (blocks.QUERIES_KERNEL, blocks.KEYS_KERNEL)}
    assert timed(gpu) == [each for found in expected.values() for each in found]
    for kernel, found in expected.items():
        assert launched(gpu, kernel.name) == min(found, key=milliseconds)
    gpu.timed.clear()
    kernels.backward(*gradient_call(call(batch=2, queries=900)))
    assert not gpu.timed


def test_lists_of_tiles_have_the_chosen_tiles(gpu):
    given = call(mask=(SEGMENTS, 0, 0, *CAUSAL, AND), masks=(torch.zeros(1, 600, dtype=torch.int32),))
    kernels.forward(*given)
    built = [(each.constexprs["ROWS"], each.constexprs["KEYS"]) for each in gpu.launches("tile_lists")]
    assert built == [*dict.fromkeys(each[:2] for each in tried(blocks.FORWARD_KERNEL))]
    assert launched(gpu) == FASTEST


def test_gradients_of_biases(gpu):
    given = call(bias=(BIAS_DENSE, 0), biases=(torch.zeros(1, 2, 600, 600, dtype=torch.bfloat16),))
    lse = torch.zeros(given.q.shape[:3])
    rest = given.mask_tensors, given.bias_tensors, given.mask, given.bias, 0.1, 0.0
    bias_call = BiasCall(given.q, lse, given.q, given.k, given.v, lse, *rest, [0])
    (found,) = kernels.bias_backward(*bias_call)
    assert found.shape == (1, 2, 600, 600)
    assert timed(gpu) == tried(blocks.BIAS_KERNEL, pair=2)
    assert launched(gpu, "attention_of_bias")[1] == 32
    assert backward.prepare_bias_backward(bias_call)(*bias_call)[0].shape == found.shape


def test_decoding(gpu):
    gpu.clock = lambda request: abs(request.constexprs.get("BLOCK", 0) - 32)
    given = call(heads=8, queries=1, keys=8192)
    decoding.decode(*given)
    (entry,) = next(record.entries for record in records.listed() if record.kernel == "decode")
    assert len(entry.tried) == len(plan.CHANGES)
    gpu_seen = decoding.device_of(-1)
    shape = decoding.shape_of(given, decoding.numbers_of(-FAR, FAR, 0.1, 0.0), False)
    chosen = plan.blocks_of(shape, gpu_seen, launches.change_of(_config(entry.best)))
    sizes = [plan.blocks_of(shape, gpu_seen, change).block for change in plan.CHANGES]
    assert sizes[0] != chosen.block == min(sizes, key=lambda block: abs(block - 32))
    last = gpu.launches("decode")[-1]
    assert (last.constexprs["BLOCK"], last.options["num_warps"]) == (chosen.block, chosen.warps)
    gpu.timed.clear()
    decoding.decode(*call(batch=2, heads=8, queries=1, keys=9000))
    assert not gpu.timed


def _config(found):
    return tuning.Config(found.config["constexprs"], found.config["options"])


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
    assert chosen == min(
        (each for each in tried(blocks.FORWARD_KERNEL) if each[1] > 32 and each[2] > 4), key=milliseconds
    )
    skipped = {each.label: each.skipped for each in records.listed()[0].entries[0].tried if each.ms is None}
    assert skipped[LABEL.format(*FASTEST)] == "unfit: it does not compile: no such layout"
    assert "out of resources: shared memory" in skipped.values()
    gpu.restart()
    kernels.forward(*call())
    assert (gpu.timed, launched(gpu)) == ([], chosen)


class Size(NamedTuple):
    block: int


@pytest.mark.parametrize("wrong", [torch.nan, 3.0])
def test_a_candidate_that_computes_something_else_is_passed_over(gpu, wrong):
    configs = tuple(tuning.Config({"BLOCK": block}) for block in (64, 32, 16))
    tile_search = search.TileSearch(
        search.identity("decode", launches.SOURCES), configs, "NVIDIA L4", "bfloat16 | d=64"
    )
    tiles: search.Tiles[Size, int] = search.Tiles(tile_search, lambda config: Size(config.constexprs["BLOCK"]))
    results = torch.full((2, 3), torch.nan, dtype=torch.bfloat16)

    def time(size):
        search.emptied(results)
        results[0] = 1.0 if size.block > 16 else wrong  # the second row is nobody's
        results[0, 0] += size.block / 6400  # what rounding makes of it
        return float(size.block), [results]

    assert tiles.choose(lambda size: size.block, time) == (Size(32), 32)
    reasons = [each.skipped for each in records.listed()[0].entries[0].tried]
    assert reasons == ["", "", "unfit: it computes something else than the first candidate"]


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
    assert timed(gpu) == tried(blocks.FORWARD_KERNEL)
    assert choices[0].config.label == LABEL.format(*FASTEST)


EXAMPLES = {
    "attention": kernels.forward, "decoding": decoding.decode, "backward": kernels.backward,
    "biases": kernels.bias_backward,
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_opkit_tune_has_calls_that_these_kernels_take(name):
    from opkit.attn.operator import attention_operator
    from opkit.op.aot import tuning as in_advance
    from opkit.op.examples import calls as example_calls

    ops = {
        "backward": gradients.backward_operator, "biases": gradients.bias_backward_operator,
    }  # fmt: skip
    op = ops.get(name, attention_operator)()
    function = EXAMPLES[name]
    assert isinstance(function, in_advance.Tunable)
    listed = {str(each) for each in in_advance.calls(op)}
    for spec in example_calls.from_examples(op._operator, function.examples):
        assert str(spec) in listed
        positional, named = example_calls.arguments_of(op._operator, spec, "meta")
        with recording() as launches:
            function(*positional, **named)
        assert launches
    assert all((each.operator, each.kernel) in in_advance.identities() for each in function.identities())


@pytest.fixture
def kernels_on_cpu(operator):
    """The portable forward takes calls of CPU tensors."""
    table = operator._operator.kernels
    own = next(each for each in table.kernels if each.name == "triton")
    others = [each for each in table.kernels if each is not own]
    table.kernels = [dataclasses.replace(own, device="cpu", priority=100), *others]
    operator._renew()


@pytest.mark.usefixtures("kernels_on_cpu")
def test_opkit_tune_searches(gpu, monkeypatch):
    from typer.testing import CliRunner

    from opkit import cli
    from opkit.op.aot import tuning as in_advance

    monkeypatch.setattr(in_advance, "device", lambda: "cpu")
    shape = ", ".join(f"{name}=bf16[1, 2, 600, 64]" for name in "qkv")
    shape += ", mask_tensors=[], bias_tensors=[], sinks=None, seed=None, mask=[], bias=[]"
    shape = f"opkit::attention({shape}, scale=0.1, softcap=0.0, dropout_p=0.0, out_is_bshd=False)"
    result = CliRunner().invoke(cli.app, ["tune", "opkit.attn.api", "--shapes", shape])
    assert result.exit_code == 0, result.output
    assert "[attention_forward]: " + LABEL.format(*FASTEST) in " ".join(result.output.split())
    assert "(tuned)" in result.output
    gpu.restart()
    assert "(recorded)" in CliRunner().invoke(cli.app, ["tune", "opkit.attn.api", "--shapes", shape]).output
    shown = CliRunner().invoke(cli.app, ["tune", "--show", "--op", "opkit::attention"]).output
    assert "attention_forward" in shown


@pytest.mark.usefixtures("kernels_on_cpu")
def test_select_says_which_tiles_and_why(gpu):
    q = call(queries=600).q
    (note,) = select(q, q, q).notes
    assert note.startswith("attention_forward: rows=128, keys=128, warps=8, stages=3 (not searched for yet, so by rule")
    assert not gpu.timed
    kernels.forward(*call())
    chosen = select(q, q, q)
    assert "rows={}, keys={}, warps={}, stages={} (the fastest by search".format(*FASTEST) in str(chosen)
    assert "for bfloat16 | d=64 e=64 extras=0 long=1 mask=0 pair=0 on NVIDIA A100-SXM4-80GB)" in str(chosen)
    (note,) = select(q, q, q, bias=torch.zeros(1, 1, 600, 600)).notes
    assert "not searched for yet" in note
    gpu.become("NVIDIA H200", "sm_90", 232448)
    assert select(q, q, q).notes == ("attention_forward: rows=128, keys=128, warps=8, stages=3 (by its table)",)
    for mask, said in (
        (Causal(), "computed from bands and lengths"),
        (lambda b, h, i, j: (i + j) % 3 > 0, "a kernel finds them from the mask's tensors and functions"),
    ):
        assert select(q, q, q, mask=mask).notes[1] == f"live tiles: {said}"


# ---- on a GPU alone --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_search_on_a_gpu(monkeypatch, tmp_path):
    """As if no table had been made for it: what is found computes the same, and is found again."""
    monkeypatch.setattr(search, "SHIPPED", ())
    settings = dataclasses.replace(config.get(), cache_dir=tmp_path)
    monkeypatch.setattr(config, "get", lambda: settings)
    tuning.forget()
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 700, 64, generator=generator, device="cuda", dtype=torch.float16) for heads in (4, 2, 2)
    )
    given = AttentionCall(q, k, v, [], [], None, None, CAUSAL, [], 0.125, 0.0, 0.0, False)
    exact = reference.attention(q.double(), k.double(), v.double(), *given[3:])[0]
    for source in ("tuned", "record"):
        with observation.observed() as choices:
            out, lse = kernels.forward(*given)
            found = kernels.backward(out, None, q, k, v, out, lse, [], [], CAUSAL, [], 0.125, 0.0, False)
            token = decoding.decode(q[:, :, -1:], *given[1:7], [], *given[8:])[0]
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=4e-3)
        assert all(each.isfinite().all() for each in (*found, token))
        assert [(each.identity.kernel, each.source) for each in choices] == [
            (name, source) for name in ("attention_forward", "attention_of_queries", "attention_of_keys", "decode")
        ]
        assert all(each.ms is not None and each.ms > 0 for each in choices)
        tuning.forget()
