"""``opkit check``: what it finds, prints and writes, and its exit status."""

import itertools
import json
from pathlib import Path

import fresh_process
import pytest
import small_properties as small
from typer.testing import CliRunner

from opkit import cli, cli_check

RUNNER = CliRunner()
NUMBERS = itertools.count()

OPERATORS = """
import torch
from torch import Tensor
from opkit.testing import tensor

@torch.library.custom_op("{ns}::one", mutates_args=())
def one(x: Tensor) -> Tensor:
    return x + 1

@torch.library.custom_op("{ns}::two", mutates_args=())
def two(x: Tensor) -> Tensor:
    return x + 2

@torch.library.custom_op("{ns}::named", mutates_args=())
def named(x: Tensor, how: str) -> Tensor:
    return x + 3

HOW = {"args": (tensor("n"),), "max_examples": 5, "database": False}
OPKIT_CHECKS = {"{ns}::one": HOW, "{ns}::two": HOW}
"""

MARKUP = """
globals()["[red]"] = lambda x: x + 1
OPKIT_CHECKS = {"[red]": {"args": (tensor("n"),)}, "{ns}::two": "a\\nb"}
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """``module(source)``: the name of a module in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    small.use(monkeypatch)

    def made(source=OPERATORS):
        name = f"checked_by_cli_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(source.replace("{ns}", name), encoding="utf-8")
        return name

    return made


def run(*arguments):
    done = RUNNER.invoke(cli.app, ["check", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_failures_are_shown_and_end_with_1(module):
    name = module()
    done = run(name)
    assert done.exit_code == 1
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0] == ["operator", "failed", "held", "skipped", "examples", "seconds"]
    assert rows[1][:5] == [f"{name}::one", "fails", "1", "2", "3"]
    assert rows[2][:2] == [f"{name}::two", "fails"]
    assert f"{name}::one breaks memory.small: The rule of memory.small <holds> & is kept." in done.stdout
    assert "  one(float32[5])\n" in done.stdout
    assert f"not checked: {name}::named: no value can be drawn for how (" in done.stdout
    assert "OPKIT_CHECKS" in done.stdout


def test_what_holds_ends_with_0(module):
    done = run(module(), "--properties", "numbers,fake", "--exclude", "numbers.remarks")
    assert done.exit_code == 0
    assert done.stdout.count("holds") == 2
    assert "breaks" not in done.stdout


def test_skipped_properties_are_counted(module):
    done = run(module(), "--exclude", "memory")
    assert done.exit_code == 0
    assert done.stdout.count("holds: 2 of 5 checked") == 2


def test_one_operator_is_named(module):
    name = module()
    for arguments in ((f"{name}:one",), (name, "--op", "one"), (f"{name}:{name}::one",)):
        done = run(*arguments, "--properties", "numbers")
        assert done.exit_code == 0
        assert "::one" in done.stdout
        assert "::two" not in done.stdout
        assert "not checked" not in done.stdout


def test_a_function_with_annotations_is_checked_where_it_is_named(module):
    source = "from torch import Tensor\ndef twice(x: Tensor) -> Tensor:\n    return x * 2\n"
    done = run(f"{module(source)}:twice", "--properties", "numbers", "--max-examples", 3)
    assert done.exit_code == 0
    assert "twice" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "nix"], "has no operator 'nix'"),
        (["--op", "named"], "no value can be drawn for how"),
        (["--properties", "nix"], "no property 'nix'"),
        (["--budget", "soon"], "write a time such as 60s"),
        (["--budget", "0s"], "write a time such as 60s"),
    ],
)
def test_bad_input_ends_with_2(module, arguments, message):
    done = run(module(), *arguments)
    assert done.exit_code == 2
    assert message in done.stderr


def test_modules_without_operators_end_with_2(module):
    assert "defines no operator" in run(module("x = 1")).stderr
    assert run(module("x = 1")).exit_code == 2
    assert "cannot be imported" in run("no_module_of_that_name").stderr
    assert run(module("import no_module_of_that_name")).exit_code == 2


def test_files_are_written(module, tmp_path):
    name = module()
    done = run(name, "--json", "out/a.json", "--html", "out/a.html", "--repro", "scripts")
    document = json.loads((tmp_path / "out" / "a.json").read_text(encoding="utf-8"))
    assert [each["name"] for each in document["operators"]] == [f"{name}::one", f"{name}::two"]
    assert [each["name"] for each in document["not_checked"]] == [f"{name}::named"]
    assert f"{name}::two" in (tmp_path / "out" / "a.html").read_text(encoding="utf-8")
    script = tmp_path / "scripts" / f"{name}_one_memory_small.py"
    assert script.read_text(encoding="utf-8") == document["operators"][0]["properties"][0]["repro"]
    assert f"This script shows it: scripts/{script.name}" in done.stdout


def test_verbose_prints_reports_and_scripts(module):
    done = run(module(), "-v", "--op", "one")
    assert "held: numbers (2)" in done.stdout
    assert "A script that shows memory.small:" in done.stdout
    assert "skipped: fake.none, fake.neither: there is no fake" in done.stdout


def test_names_of_users_are_no_markup(module, monkeypatch):
    source = OPERATORS + MARKUP
    done = run(module(source), "--properties", "numbers", "--max-examples", 2)
    assert "[red]  " in done.stdout
    assert "a\\nb" in done.stdout


def test_a_check_that_breaks_off_spares_the_others(module, monkeypatch):
    source = OPERATORS.replace('"{ns}::one": HOW', '"{ns}::one": {"args": 5}')
    done = run(module(source), "--properties", "numbers")
    assert done.exit_code == 1
    assert "::one: the check itself ended with TypeError" in done.stdout
    assert "::two  holds" in done.stdout


def test_the_budget_is_shared(module, monkeypatch):
    clock = small.Clock(monkeypatch, cli_check)
    small.use(monkeypatch, [small.made("numbers.endless", clock.takes(0.01), cost=0.01, least=10**6)])
    done = run(module(), "--budget", "1s")
    assert 0.9 < clock.now <= 1.05
    assert (
        done.stdout.count("::one  holds") + done.stdout.count("::two  holds") + done.stdout.count("  not checked") == 2
    )


def test_ctrl_c_prints_what_was_found(module, monkeypatch):
    def interrupts(subject, case):
        raise KeyboardInterrupt

    small.use(monkeypatch, [*small.PROPERTIES, small.made("numbers.last", interrupts, cost=1.0)])
    done = run(module(), "--json", "a.json")
    assert done.exit_code == 130
    assert "breaks memory.small" in done.stdout
    assert "Interrupted" in done.stdout
    assert len(json.loads(Path("a.json").read_text(encoding="utf-8"))["operators"]) == 1


def test_the_command_is_there():
    assert "--properties" in fresh_process.run(["-m", "opkit", "check", "--help"]).stdout
