"""``opkit bench list``, ``run`` and ``compare``: times of opkit and its peers; every case of every topic is exhaustive."""

import json

import pytest
import torch
from typer.testing import CliRunner

from opkit import cli
from opkit.bench import figures, timing
from opkit.bench.figures import Figure, Run
from opkit.bench.figures_page import run_page
from opkit.bench.topics import TOPICS, Case, Setting

QUICK = Setting(quick=True)
SETUP = {"machine": "a processor", "opkit": "1", "torch": "2", "device": "cpu", "threads": 1, "quick": True}


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    threads = torch.get_num_threads()  # --threads is for a process of its own
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    yield
    torch.set_num_threads(threads)


def bench(*arguments):
    return CliRunner().invoke(cli.app, ["bench", *map(str, arguments)])


def run_of(*cases, slower=1.0, spread=0.0):
    """A run whose cases are twice as fast as their peer, or less."""
    noise = [1 - spread, 1.0, 1 + spread] * 3
    seconds = {"opkit": [slower * each for each in noise], "peer": [2.0] * 9}
    return Run(SETUP, [Figure("dispatch", name, seconds) for name in cases])


def test_topics_are_listed():
    done = bench("list")
    assert done.exit_code == 0
    assert all(name in done.output for name in TOPICS)


def test_a_run_prints_tables_and_writes_files(tmp_path):
    paths = {each: tmp_path / f"run.{each}" for each in ("json", "md", "html")}
    options = ["--threads", 1, "--quick", "--only", "a float and"]
    files = ["--out", paths["json"], "--markdown", paths["md"], "--html", paths["html"]]
    done = bench("run", "dispatch", *options, *files)
    assert done.exit_code == 0, done.output
    assert "(custom_op)" in done.output
    assert "2 cases: " in done.output
    found = Run.read(paths["json"])
    assert [each.case for each in found.figures] == ["a float and None", "a float and None, through torch.ops"]
    assert found.setup["threads"] == 1
    assert all(len(times) >= 3 and min(times) > 0 for each in found.figures for times in each.seconds.values())
    assert "| a float and None | " in paths["md"].read_text()
    assert paths["html"].read_text().count("<svg") == 1
    again = bench("compare", paths["json"], paths["json"])
    assert again.exit_code == 0
    assert "2 cases: 0 slower, 0 faster, 0 failed." in again.output


def test_a_slower_case_is_marked_unless_rounds_differ_as_much(tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    run_of("a", "b").write(old)
    Run(SETUP, [*run_of("a", slower=1.2).figures, *run_of("c").figures]).write(new)
    done = bench("compare", old, new)
    assert done.exit_code == 1
    lines = {line.split()[1]: line.split() for line in done.output.splitlines() if line.startswith("dispatch")}
    assert lines["a"] == ["dispatch", "a", "peer", "2x", "1.67x", "0.83x", "0%", "slower"]
    assert lines["b"][-1] == "gone"
    assert lines["c"][-1] == "new"
    (change,) = figures.changes(run_of("a"), run_of("a", slower=1.2, spread=0.4))
    assert change.verdict == ""
    assert change.noise > 0.2
    (change,) = figures.changes(run_of("a", slower=1.2), run_of("a"))
    assert change.verdict == "faster"


def test_a_slower_machine_does_not_count():
    old, new = run_of("a"), run_of("a")
    new.figures[0].seconds = {way: [3 * each for each in times] for way, times in new.figures[0].seconds.items()}
    assert figures.changes(old, new)[0].verdict == ""


def test_a_case_that_fails_is_reported():
    def fails():
        raise ValueError("[no] kernel\nmore")

    figure = figures.measured("dispatch", Case("<broken>", fails), QUICK)
    assert figure.error == "ValueError: [no] kernel"
    assert "ValueError: [no] kernel" in figures.markdown(Run(SETUP, [figure]))
    assert "&lt;broken&gt;" in run_page(Run(SETUP, [figure]))
    assert figures.changes(run_of("<broken>"), Run(SETUP, [figure]))[0].verdict == "failed"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "speed"], "there is no topic 'speed'"),
        (["run", "dispatch", "--only", "nothing"], "no case of dispatch has 'nothing' in its name"),
        (["run", "dispatch", "--device", "nowhere"], "nowhere"),
        (["run", "dispatch", "--out", "no/folder/run.json"], "there is no folder"),
        (["compare", "no.json", "no.json"], "no.json is not a file of `opkit bench run`"),
    ],
)
def test_bad_input_is_refused(arguments, said):
    done = bench(*arguments)
    assert done.exit_code == 2
    assert said in done.output


def test_a_file_of_another_format_is_refused(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"format": 99}))
    done = bench("compare", tmp_path / "a.json", tmp_path / "a.json")
    assert "format 99, and this version reads 1" in done.output


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TOPICS)
def test_every_case_runs(name):
    cases = [*TOPICS[name].cases(QUICK)]
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        figure = figures.measured(name, case, QUICK)
        assert not figure.error, (case.name, figure.error)
        assert next(iter(figure.seconds)) == "opkit"
        assert figure.base is not None
