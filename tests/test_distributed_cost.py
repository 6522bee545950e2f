"""benchmarks/distributed_cost.py: what it records is what its page's formulas say, and simulated times obey simple rules."""

import dataclasses
import json
import math
from pathlib import Path

import distributed_cost_cases as cases
import processes
import pytest
import torch

import opkit
from opkit import compat
from opkit.masks import Causal, SlidingWindow

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch has no gloo here", allow_module_level=True)

FILE = Path(cases.__file__)
PIPELINES = pytest.mark.skipif(
    compat.release(torch.__version__) < (2, 14), reason="torch before 2.14 has no pipelines on fake process groups"
)


def infinite(machine):
    return dataclasses.replace(
        machine, nvlink=math.inf, infiniband=math.inf, nvlink_latency=0.0, infiniband_latency=0.0
    )


@pytest.mark.parametrize(
    ("fields", "sizes", "rank"),
    [
        ({"fsdp": 4, "tp": 2}, (50, 64, 4, 2, 32, 8), 5),
        ({"fsdp": 64, "cp": 8}, (1000, 512, 8, 1, 64, 64), 0),
        ({"fsdp": 16, "cp": 8, "tp": 8, "method": "ring"}, (1000, 512, 8, 1, 64, 16), 1023),
        pytest.param({"fsdp": 2, "cp": 4, "tp": 2, "method": "ring"}, (50, 64, 4, 2, 64, 2), 3, marks=pytest.mark.exhaustive),
        pytest.param({"fsdp": 1024}, (1000, 512, 8, 1, 16, 1024), 7, marks=pytest.mark.exhaustive),
        pytest.param({"fsdp": 8, "cp": 64, "tp": 2, "method": "ring"}, (99, 64, 2, 1, 256, 8), 9, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)  # fmt: skip
def test_torch_issues_what_the_formulas_say(fields, sizes, rank):
    with cases.cost()["fake_group"](rank, math.prod(n for n in fields.values() if isinstance(n, int))):
        cases.check(cases.plan(**fields), cases.sizes(*sizes))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, ["exchange"]),
        pytest.param(2, ["fsdp", "tensors", "ring", "pipeline"], marks=pytest.mark.exhaustive),
        pytest.param(4, ["fsdp", "fsdp_and_tensors", "ring_and_tensors", "exchange"], marks=pytest.mark.exhaustive),
    ],
)
def test_processes_issue_what_the_formulas_say(tmp_path, world, names):
    found = processes.results_of(FILE, world, names, tmp_path)
    assert found == {name: [""] * world for name in names}, str(found)


@pytest.mark.parametrize("window", [None, 17, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (5, 60))])
@pytest.mark.parametrize("balanced", [False, True])
def test_keys_that_none_sees_are_not_sent(window, balanced):
    mask = Causal() if window is None else Causal() & SlidingWindow(window)
    q = torch.randn(1, 1, 16, 8, requires_grad=True)
    group, environment, record = (cases.cost()[name] for name in ("fake_group", "environment", "record"))
    for rank in range(8):
        with (
            group(rank, 8),
            environment(False, torch.float32),
            opkit.context_parallel(dist.group.WORLD, method="ring", balanced=balanced),
        ):
            program = record(lambda: opkit.attention(q, q, q, mask=mask).sum().backward())
        to, of = cases.ring_messages(128, 8, rank, balanced, window)
        counts = {"send": 2 * to + of, "recv": 2 * of + to}
        message = 2 * q.numel() * 4
        assert program.totals() == {kind: (count, count * message) for kind, count in counts.items() if count}


@pytest.fixture(scope="module")
def program():
    with cases.cost()["fake_group"](0, 32):
        return cases.cost()["recorded"](cases.plan(fsdp=2, cp=8, tp=2, method="ring"), cases.sizes(64, 64, 4, 2, 64, 2))


def test_without_overlap_times_add_up(program):
    machine, simulate = cases.cost()["Machine"](), cases.cost()["simulate"]
    communication = [machine.seconds(op, 0) for op in program.ops if op.kind in cases.cost()["KINDS"]]
    kernels = program.flops / machine.flops
    assert simulate([program], machine, overlap=False) == pytest.approx(kernels + sum(communication))
    overlapped = simulate([program], machine)
    assert max(communication) < overlapped < kernels + sum(communication)


def test_with_infinite_links_kernels_remain(program):
    machine, simulate = cases.cost()["Machine"](), cases.cost()["simulate"]
    assert simulate([program], infinite(machine)) == pytest.approx(program.flops / machine.flops)


def test_slow_kernels_hide_the_messages_of_a_ring(program):
    machine = dataclasses.replace(cases.cost()["Machine"](), flops=1e6)
    exposed = cases.cost()["simulate"]([program], machine) - program.flops / machine.flops
    others = [op for op in program.ops if op.kind in ("all_gather", "reduce_scatter", "all_reduce")]
    assert 0 < exposed < sum(machine.seconds(op, 0) for op in others)


def test_rings_pass_each_node_once():
    machine, op = cases.cost()["Machine"](), cases.cost()["Op"]
    gathered = op("all_gather", frozenset(), size=1600, ranks=tuple(range(16)))
    assert machine.sent(gathered, 0) == {"nvlink": 1500, "infiniband": 100}
    apart = op("all_reduce", frozenset(), size=1600, ranks=(0, 8))
    assert machine.sent(apart, 0) == {"infiniband": 1600}
    exchanged = op("all_to_all", frozenset(), size=1600, ranks=tuple(range(16)))
    assert machine.sent(exchanged, 0) == {"nvlink": 700, "infiniband": 800}
    assert machine.latency(gathered, 0) == pytest.approx(14 * machine.nvlink_latency + machine.infiniband_latency)


@PIPELINES
@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        ("1F1B", 1),
        pytest.param("GPipe", 1, marks=pytest.mark.exhaustive),
        pytest.param("Interleaved1F1B", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_bubbles_of_equal_stages(schedule, chunks):
    stages, microbatches = 3, 3
    plan = cases.plan(fsdp=2, pp=stages, schedule=schedule, chunks=chunks, microbatches=microbatches)
    programs = cases.cost()["programs_of"](plan, cases.sizes(1, 64, 4, stages * chunks, 16, 2 * microbatches))
    machine = infinite(cases.cost()["Machine"]())
    total = cases.cost()["simulate"](programs, machine)
    kernels = sum(each.flops for each in programs) / stages / machine.flops
    bubble = (stages - 1) / (chunks * microbatches + stages - 1)
    assert 1 - kernels / total == pytest.approx(bubble, abs=2e-3)
    neighbours = chunks * microbatches * 2  # of a rank between two others
    assert programs[1].totals()["send"] == (neighbours, neighbours * 16 * 64 * 2)
    assert {kind: programs[1].totals()[kind][0] for kind in ("all_gather", "reduce_scatter")} == {
        "all_gather": chunks,
        "reduce_scatter": chunks,
    }


def test_the_command_prints_tables(tmp_path, capsys):
    model = ["--layers=1", "--width=64", "--heads=4", "--tokens=16", "--vocabulary=64"]
    cases.cost()["main"](["--plan=tp=2", "--gpus=4,16", *model, f"--json={tmp_path / 'rows.json'}"])
    printed = capsys.readouterr().out
    assert "| 16 | fsdp 8 x tp 2 | 8 |" in printed
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["infiniband (GB)"] >= 0 for row in rows] == [True, True]
    assert rows[0]["collectives"] == 7 + 3 + 2
