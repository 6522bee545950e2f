"""Tiles by search, on GPUs that no table was made for: when a search is made, what it keeps and says. No GPU is needed."""

import dataclasses
import gc
import os
import weakref
from pathlib import Path

import fake_gpu
import fresh_process
import pytest
import torch
from fake_gpu import CAUSAL, FASTEST, KERNELS, call, gradient_call, launched, timed, tried

from opkit.attn.gpu import arguments, blocks, kernels, search
from opkit.attn.gpu.decode import decoding, launches
from opkit.attn.gpu.portable import forward
from opkit.attn.masks.program import BIAS_DENSE, SEGMENTS
from opkit.errors import TuningWarning
from opkit.kernels.tuning import records
from opkit.op.dispatch import selection
from opkit.op.triton.launch import recording

fake_libraries, fake, gpu = fake_gpu.fake_libraries, fake_gpu.fake, fake_gpu.gpu


# ---- once ------------------------------------------------------------------------------------------------------------


def test_the_fastest_is_found_once_for_a_class_and_kept(gpu):
    kernels.forward(*call())
    assert timed(gpu) == tried(blocks.FORWARD_KERNEL)
    assert FASTEST == launched(gpu) != tried(blocks.FORWARD_KERNEL)[0]
    for other in (call(batch=3), call(heads=5), call(queries=1000), call(queries=1000, keys=77), call(d=40)):
        kernels.forward(*other)
        assert launched(gpu) == FASTEST
    assert len(gpu.timed) == len(tried(blocks.FORWARD_KERNEL))
    gpu.restart()
    kernels.forward(*call(queries=2000))
    assert launched(gpu) == FASTEST
    assert not gpu.timed
    (record,) = records.listed()
    assert (record.operator, record.kernel) == ("opkit::attention", "attention_forward")
    (entry,) = record.entries
    assert (entry.device, entry.bucket) == (
        "NVIDIA A100-SXM4-80GB",
        "bfloat16 | d=64 e=64 extras=0 long=1 mask=0 pair=0",
    )


def test_one_plan_asks_once(gpu):
    run = kernels.forward.prepare(*call())
    run(*call())
    gpu.timed.clear()
    run(*call())
    assert (gpu.timed, launched(gpu)) == ([], FASTEST)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "other",
    [
        call(queries=512), call(d=128), call(mask=(SEGMENTS, 0, 0), masks=(torch.zeros(1, 600, dtype=torch.int32),)),
        call(bias=(BIAS_DENSE, 0), biases=(torch.zeros(1, 1, 600, 600, dtype=torch.bfloat16),)),
        call(dtype=torch.float16), call(dtype=torch.float32), call(mask=CAUSAL), call()._replace(softcap=5.0),
        call()._replace(dropout_p=0.5, seed=torch.zeros(2, dtype=torch.int64)),
    ],
    ids=["few queries", "heads of 128", "documents", "bias", "float16", "float32", "causal", "softcap", "dropout"],
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
    assert len(set(timed(gpu))) == len(gpu.timed) < len(tried(blocks.FORWARD_KERNEL))  # what is cut alike is timed once
    gpu.timed.clear()
    kernels.forward(*call(queries=500))
    assert (gpu.timed, launched(gpu)[0] > 32) == ([], True)


def test_another_gpu_and_an_edited_kernel_are_searched_anew(gpu, monkeypatch):
    kernels.forward(*call())
    gpu.restart()
    gpu.become("NVIDIA L4", "sm_89", 101376)
    kernels.forward(*call())
    assert timed(gpu) == tried(blocks.FORWARD_KERNEL, shared=101376)
    gpu.restart()
    kernels.forward(*call())
    assert not gpu.timed
    edited = search.identity
    monkeypatch.setattr(search, "identity", lambda *named: dataclasses.replace(edited(*named), hash="edited"))
    gpu.restart()
    kernels.forward(*call())
    assert timed(gpu) == tried(blocks.FORWARD_KERNEL, shared=101376)


def test_the_hash_is_of_what_runs_on_the_gpu():
    names = [each for kernel in KERNELS for each in kernel.sources] + list(launches.SOURCES)
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
    assert timed(gpu) == tried(blocks.FORWARD_KERNEL)


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


CALLS = {
    "forward": (kernels.forward, call),
    "backward": (kernels.backward, lambda: gradient_call(call())),
    "decoding": (decoding.decode, lambda: call(queries=1, keys=8192)),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_prepared_keeps_no_tensor_of_the_call(gpu, name):
    gpu.clock = lambda request: 1.0
    function, make = CALLS[name]
    given = make()
    run = function.prepare(*given)
    run(*given)
    tensors = [weakref.ref(each) for each in given if isinstance(each, torch.Tensor)]
    del given
    gc.collect()
    assert tensors
    assert not any(each() is not None for each in tensors)
    run(*make())


# ---- where nothing is timed ------------------------------------------------------------------------------------------


def test_nothing_is_timed_while_a_graph_is_captured(gpu, monkeypatch):
    run = kernels.forward.prepare(*call())
    monkeypatch.setattr(selection, "capturing", lambda: True)
    with pytest.warns(TuningWarning, match=r"attention_forward.* cannot be while a CUDA graph is captured.*ROWS=128"):
        run(*call())
    run(*call())
    assert (gpu.timed, launched(gpu)) == ([], tried(blocks.FORWARD_KERNEL)[0])
    monkeypatch.setattr(selection, "capturing", lambda: False)
    run(*call())
    assert (len(gpu.timed), launched(gpu)) == (len(tried(blocks.FORWARD_KERNEL)), FASTEST)
    monkeypatch.setattr(selection, "capturing", lambda: True)
    kernels.forward(*call(batch=7))
    assert launched(gpu) == FASTEST


def test_a_captured_call_takes_the_tiles_of_similar_ones(gpu, monkeypatch):
    kernels.forward(*call())
    monkeypatch.setattr(selection, "capturing", lambda: True)
    with pytest.warns(TuningWarning, match=r"the configuration for bfloat16 \| d=64 e=64 extras=0 long=1 mask=0"):
        kernels.forward(*call(mask=CAUSAL))
    assert launched(gpu) == FASTEST


def test_switched_off(gpu):
    gpu.settings(tune=False)
    run = kernels.forward.prepare(*call())
    for _ in range(2):
        run(*call())
        assert (gpu.timed, launched(gpu)) == ([], tried(blocks.FORWARD_KERNEL)[0])


def test_nothing_is_timed_while_launches_are_recorded_or_traced(gpu):
    with recording() as found:
        kernels.forward(*call())
    assert [values.bound.kernel.name for values in found] == ["attention_forward"]
    tile_search = arguments.tile_search_of(blocks.FORWARD_KERNEL, call(), arguments.shape_of(call()))
    with torch.utils._python_dispatch.TorchDispatchMode():
        choice = tile_search.decide(lambda config: pytest.fail("timed"))
    assert (choice.source, gpu.timed) == ("first", [])


def test_of_the_gpus_that_tables_were_made_on_nothing_is_asked(gpu):
    gpu.become("NVIDIA H200", "sm_90", 232448)
    given = call()
    kernels.forward(*given)
    assert launched(gpu) == (128, 128, 8, 3)
    kernels.backward(*gradient_call(given))
    assert launched(gpu, "attention_of_keys") == (64, 64, 4, 2)
    assert launched(gpu, "attention_of_queries") == (64, 64, 4, 3)
    decoding.decode(*call(queries=1, keys=8192))
    assert (gpu.timed, records.listed()) == ([], [])


SHIPPED = {
    blocks.FORWARD_KERNEL: [(128, 128, 8, 3), (128, 64, 8, 4), (64, 64, 8, 2), (64, 32, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2)],
    blocks.KEYS_KERNEL: [(64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (16, 32, 8, 1), (32, 32, 4, 1), (32, 32, 4, 1)],
    blocks.QUERIES_KERNEL: [(64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 8, 1), (32, 16, 8, 1), (32, 32, 4, 1), (32, 32, 4, 1)],
    blocks.BIAS_KERNEL: [(64, 64, 4, 1), (64, 64, 4, 1), (64, 64, 8, 1), (32, 16, 8, 1), (32, 32, 4, 1), (32, 32, 4, 1)],
}  # fmt: skip
"""Of an H200, for heads of 64, 128, 256 and 576 in two bytes, and of 64 and 128 in four."""


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_the_shipped_tables_stay_what_they_are(kernel):
    heads = ((64, 2), (128, 2), (256, 2), (576, 2), (64, 4), (128, 4))
    found = [tuple(blocks.choose(kernel.rules, d, size, 4096, 232448, kernel.tensors)) for d, size in heads]
    assert found == SHIPPED[kernel]


def test_batch_invariance_is_never_searched_for(gpu):
    given = call()
    forward.prepare_forward(given, ordered=True)(*given)
    assert (gpu.timed, launched(gpu)) == ([], tuple(blocks.invariant(64, 2, 232448)))


# ---- processes -------------------------------------------------------------------------------------------------------

CHILD = """
import sys, time
from pathlib import Path
from opkit.attn.gpu import search
from opkit.kernels.tuning.configs import Config
configs = tuple(Config({"ROWS": rows}) for rows in (32, 64, 128))
def measure(each):
    print("measuring", each.constexprs["ROWS"], flush=True)
    time.sleep(0.2)
    return abs(each.constexprs["ROWS"] - 64)
mine, other = map(Path, sys.argv[1:])
mine.touch()
while not other.exists():
    time.sleep(0.01)
asked = search.TileSearch(search.identity("attention_forward", ("device/tile.py",)), configs, "NVIDIA A100", "bfloat16 | d=64")
print("chosen", asked.decide(measure).config.constexprs["ROWS"], flush=True)
"""


def test_of_two_processes_one_searches(tmp_path):
    given = os.environ | {"OPKIT_CACHE_DIR": str(tmp_path)}
    ready = [tmp_path / "one", tmp_path / "other"]
    both = [fresh_process.start(["-c", CHILD, *each], given) for each in (ready, ready[::-1])]
    outputs = sorted((each.wait().stdout.splitlines() for each in both), key=len)
    assert outputs == [["chosen 64"], ["measuring 32", "measuring 64", "measuring 128", "chosen 64"]]
