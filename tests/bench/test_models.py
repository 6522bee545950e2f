"""``opkit bench models``: models that need no package, measured through the command line; the whole zoo is exhaustive."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

from opkit import cli
from opkit.bench import compilation, jobs, results
from opkit.bench.measurement import Request
from opkit.bench.results_page import results_page
from opkit.bench.zoo.table import architectures, chosen

RUNNER = CliRunner()


FAILING_MODELS = """
import os, signal, torch

class Model(torch.nn.Linear):
    default_cfg = {"input_size": (3, 8, 8)}

    def forward(self, x):
        if self.training:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().forward(x)

def create_model(name, **_):
    if name == "mixnet_l" and not os.path.exists(before := f"{os.path.dirname(__file__)}/before"):
        open(before, "x").close()
        raise torch.OutOfMemoryError("CUDA out of memory")
    if name == "mixnet_l":
        raise ValueError("no weights")
    return Model(64, 4)
"""


def run(*arguments):
    return RUNNER.invoke(cli.app, ["bench", "models", "--threads", "1", *map(str, arguments)])


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Two models through the command line: the file of results, and what was printed."""
    path = tmp_path_factory.mktemp("bench") / "models.jsonl"
    done = run("--only", "lstm", "--only", "actor_critic", "--backend", "opkit", "--out", path)
    assert done.exit_code == 0, done.output
    return path, done.output


# ---- measurements ----------------------------------------------------------------------------------------------------


def test_records(measured):
    records = {each["model"]: each for each in results.read(measured[0])}
    assert set(records) == {"lstm", "actor_critic"}
    for record in records.values():
        assert record["status"] == "passed"
        assert set(record["errors"]) == {"forward", "loss", "gradients", "steps"} == set(record["eager_errors"])
        assert record["reference"] == "float64"
        assert all(record[what][name] > 0 for what in ("inference", "training") for name in ("cold", "warm", "ratio"))
    assert records["actor_critic"]["graphs"] == 1
    assert records["actor_critic"]["recompiles"] == 1  # to a graph of any batch size
    assert not records["actor_critic"]["fallbacks"]
    assert not results.not_whole(records["actor_critic"])
    assert "no graph was captured" in results.not_whole(records["lstm"])[0]  # Dynamo leaves recurrent networks alone


def test_the_table(measured):
    lines = measured[1].splitlines()
    assert sum(line.startswith("passed ") for line in lines) == 2
    assert any(line.split()[:3] == ["actor_critic", "opkit", "passed"] for line in lines)
    assert any(line.startswith("opkit: 2 of 2 pass; 1 with graph breaks") for line in lines)


def test_library_calls_by_design_are_no_fallbacks():
    def experts(x, weight, ends):
        return torch.nn.functional.grouped_mm(x, weight, offs=ends).relu()

    def counts(x, weight, ends):
        return torch.histc(x.float(), 4).relu()  # the range is that of the data

    torch.manual_seed(0)
    x, weight = torch.randn(8, 16, dtype=torch.bfloat16), torch.randn(2, 16, 8, dtype=torch.bfloat16)
    args = x, weight, torch.tensor([3, 8], dtype=torch.int32)
    for function, expected in ((experts, []), (counts, ["aten.histc.default"])):
        fallbacks = compilation.Fallbacks()
        with fallbacks.recorded():
            found = torch.compile(function, backend="opkit")(*args)
        torch.testing.assert_close(found, function(*args))
        assert [name.split(":")[0] for name in fallbacks] == expected


def test_a_run_goes_on_after_an_interruption(measured, tmp_path):
    path = tmp_path / "models.jsonl"
    of_lstm, other = sorted(measured[0].read_text(encoding="utf-8").splitlines(), key=lambda line: '"lstm"' not in line)
    path.write_text(f"{other}\n{of_lstm[:-40]}", encoding="utf-8")  # the last line is not whole
    done = run("--only", "lstm,actor_critic", "--backend", "opkit", "--out", path)
    assert done.exit_code == 0, done.output
    assert "1 of 2 are in" in done.output
    assert [line.split()[1] for line in done.output.splitlines() if line.startswith("passed ")] == ["lstm,"]
    assert len(results.read(path)) == 2


# ---- models that do not pass -----------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_failures_are_reported(tmp_path, monkeypatch):
    """A package in place of timm: a model ends the process when it is trained, and another cannot be made.

    The second finds no memory next to the first, and is measured again.
    """
    (tmp_path / "timm.py").write_text(FAILING_MODELS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    path = tmp_path / "models.jsonl"
    done = run("--only", "lcnet_050,mixnet_l", "--backend", "eager", "--jobs", "2", "--out", path)
    assert done.exit_code == 1
    died, raised = results.read(path)
    assert "SIGSEGV" in died["error"]
    assert died["stage"] == "training in eager mode"
    assert died["inference"]["ratio"] > 0  # what was measured before is not lost
    assert raised["error"] == "ValueError: no weights"
    assert raised["stage"] == "build"
    assert "eager: 0 of 2 pass" in done.output
    jobs_of = [jobs.Job(architectures()[each["model"]], Request(each["model"], "eager")) for each in (died, raised)]
    assert jobs.missing(jobs_of, [died, raised]) == []
    assert jobs.missing(jobs_of, [died, raised], retry=True) == jobs_of


@pytest.mark.exhaustive
def test_a_signal_ends_the_processes_that_measure(tmp_path):
    started = tmp_path / "started"
    (tmp_path / "timm.py").write_text(
        f"import os, time\n\ndef create_model(name, **_):\n    open({str(started)!r}, 'w').write(f'{{os.getpid()}} ')\n"
        "    time.sleep(600)\n"
    )
    search = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    arguments = ["--only", "lcnet_050", "--out", str(tmp_path / "models.jsonl")]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "opkit", "bench", "models", *arguments], env={**os.environ, "PYTHONPATH": search}
    )
    while not (started.exists() and (text := started.read_text()).endswith(" ")):
        assert process.poll() is None
        time.sleep(0.1)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(text), 0)


def test_the_time_limit(tmp_path):
    done = run("--only", "actor_critic", "--backend", "opkit", "--timeout", "1", "--out", tmp_path / "models.jsonl")
    assert done.exit_code == 1
    assert "it took more than 1 seconds" in done.output


def test_a_missing_package_is_reported(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "timm" else find(name))
    path = tmp_path / "models.jsonl"
    done = run("--only", "regnety_002", "--out", path)
    assert done.exit_code == 0, done.output
    assert {each["status"] for each in results.read(path)} == {"skipped"}
    assert 'needs timm: pip install "opkit[models]"' in done.output
    assert "opkit: 0 of 0 pass, 1 skipped" in done.output


def test_unknown_names_are_refused(tmp_path):
    done = run("--only", "regnety", "--out", tmp_path / "models.jsonl")
    assert done.exit_code == 2
    assert "regnety_002" in done.output
    assert run("--family", "none").exit_code == 2
    assert run("--device", "toaster").exit_code == 2
    assert run("--only", "dlrm", "--out", tmp_path / "none" / "models.jsonl").exit_code == 2
    assert "opkit" in run("--only", "dlrm", "--backend", "indctor").output
    assert run("--compare", tmp_path / "a", tmp_path / "b").exit_code == 2


# ---- files, totals and pages -----------------------------------------------------------------------------------------


def record_of(model, backend="opkit", status="passed", speed=2.0, cold=4.0, **more):
    times = {"cold": cold, "warm": 1.0, "ratio": speed, "eager": 0.2, "compiled": 0.1, "memory": 10, "eager_memory": 20}
    key = {"model": model, "backend": backend, "size": "tiny", "device": "cpu", "dtype": "float32", "family": "timm"}
    timed = {"inference": times, "training": times} if status == "passed" else {"error": "RuntimeError: <no>"}
    measures = {"errors": {"forward": 2e-7}, "eager_errors": {"forward": 1e-7}, "breaks": [], "fallbacks": {}}
    return {**key, "status": status, "graphs": 1, "recompiles": 1, **measures, **timed, **more}


def write(path, records):
    path.write_text("".join(f"{json.dumps(each)}\n" for each in records), encoding="utf-8")
    return path


def test_differences(tmp_path):
    fallback = {"aten.sort.default: no rule": 2}
    old = write(tmp_path / "old", [record_of("a"), record_of("b"), record_of("c"), record_of("same")])
    new = [
        record_of("a", status="failed"),
        record_of("b", fallbacks=fallback),
        record_of("c", speed=3.0, cold=1.0),
        record_of("same", speed=2.1),
    ]
    done = run("--compare", old, write(tmp_path / "new", new))
    assert done.exit_code == 0, done.output
    assert "5 differences." in done.output
    lines = [line.split() for line in done.output.splitlines()]
    assert ["a", "opkit", "result", "passed", "failed"] in lines
    assert ["b", "opkit", "fallbacks", "none", "aten.sort.default:", "no", "rule"] in lines
    assert ["c", "opkit", "cold", "compile,", "seconds", "8.0", "2.0"] in lines
    assert not any(line[0] == "same" for line in lines if line)


def test_totals_compare_models_that_passed_with_both():
    records = [
        *(record_of("a", speed=4.0, cold=2.0), record_of("a", "inductor", speed=2.0, cold=20.0)),
        *(record_of("b", speed=9.0), record_of("b", "inductor", status="failed")),
    ]
    ours, peer = results.totals(records)
    assert (ours.passed, ours.failed, ours.inference) == (2, 0, pytest.approx(6.0))
    assert (peer.passed, peer.failed) == (1, 1)
    assert results.over_peer(records)["inference"] == pytest.approx(2.0)
    assert results.over_peer(records)["cold compile"] == pytest.approx(10.0)


def test_the_page():
    page = results_page([record_of("<a>"), record_of("b", status="failed"), record_of("c", fallbacks={"aten.sort": 1})])
    assert page.count("<svg") == 2
    assert page.count('class="filter"') == 1
    assert "&lt;a&gt;, opkit: 2.00" in page
    assert "RuntimeError: &lt;no&gt;" in page
    assert "fallback: aten.sort (1 times)" in page
    assert "http" not in page  # it loads nothing


def test_later_records_replace_earlier_ones(tmp_path):
    path = tmp_path / "models.jsonl"
    results.append(path, record_of("a", status="failed"))
    results.append(path, record_of("a"))
    assert [each["status"] for each in results.read(path)] == ["passed"]
    assert results.read(tmp_path / "none") == []


# ---- the zoo ---------------------------------------------------------------------------------------------------------


def test_the_zoo():
    families = [each.family for each in architectures().values()]
    assert families.count("transformers") >= 46
    assert families.count("timm") == 61
    assert len(families) - families.count("transformers") - families.count("timm") >= 20
    assert len(chosen(sample=5)) == 5
    assert [each.name for each in chosen(families=["decisions"])] == ["dlrm", "actor_critic", "dqn"]
    assert "dlrm" in run("--list").output


@pytest.mark.exhaustive
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", architectures())
def test_every_model_passes(name, tmp_path):
    architecture = architectures()[name]
    for package in architecture.packages:
        pytest.importorskip(package)
    path = tmp_path / "models.jsonl"
    jobs.run([jobs.Job(architecture, Request(name, "opkit", threads=1))], path, 900, lambda job, record: None)
    (record,) = results.read(path)
    assert record["status"] == "passed", record
