"""The command line: what it prints, the status it ends with, and what it says to bad input.

Most tests use stand-ins with the attributes that the commands print; the last ones use operators.
"""

import dataclasses
import re
import sys
import types

import fresh_process
import pytest
from typer.testing import CliRunner

import opkit
from opkit import cli, doctor, errors
from opkit.op.description import RuleInfo

RUNNER = CliRunner()


def run(*arguments):
    return RUNNER.invoke(cli.app, list(arguments))


def make(name):
    description = types.SimpleNamespace(
        name=name,
        schema="(Tensor x) -> Tensor",
        doc="Normalises x.\n\nAt length.",
        reference="torch",
        mutates=("x",),
        mutation_origin="inferred by tracing",
        kernels=(
            types.SimpleNamespace(
                name="numpy",
                device="cpu",
                dtypes=("float32",),
                priority=1,
                condition="x.shape[-1] <= 4096",
                enabled=True,
            ),
            types.SimpleNamespace(name="off", device="cuda", dtypes=(), priority=0, condition="", enabled=False),
        ),
        rules=(
            types.SimpleNamespace(rule="backward", origin="derived", detail="from the reference"),
            types.SimpleNamespace(rule="fake", origin="given", detail="ops.py:12"),
            types.SimpleNamespace(rule="vmap", origin="not derivable", detail="line 7 [draws] random numbers"),
        ),
        tags=("pt2_compliant_tag",),
        contract_hash="0123abcd",
    )
    return types.SimpleNamespace(name=name, describe=lambda: description)


@pytest.fixture
def registered(monkeypatch):
    operators = {name: make(name) for name in ("fake::rms_norm", "fake::rope")}

    def get(name):
        if name not in operators:
            raise errors.UnknownOperatorError(f"no operator {name!r}; did you mean 'fake::rms_norm'?")
        return operators[name]

    monkeypatch.setattr(opkit, "operators", lambda: list(operators.values()), raising=False)
    monkeypatch.setattr(opkit, "get", get, raising=False)
    return operators


@pytest.fixture
def module_folder(tmp_path, monkeypatch):
    """A working directory with modules in it, that leaves ``sys.path`` and ``sys.modules`` as they were."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_list_prints_every_operator(registered):
    result = run("list")
    assert result.exit_code == 0
    for text in (*registered, "numpy (cpu)", "(Tensor x) -> Tensor"):
        assert text in result.stdout


def test_list_says_so_where_there_is_none(registered):
    registered.clear()
    result = run("list")
    assert result.exit_code == 0
    assert "opkit list --module" in result.stdout


def test_list_imports_the_modules_named_first(registered, module_folder):
    (module_folder / "late_ops.py").write_text("import sys; sys.modules['late_ops'].seen = True\n")
    assert run("list", "--module", "late_ops").exit_code == 0
    assert sys.modules["late_ops"].seen


def test_describe_prints_each_rule_with_its_origin(registered, monkeypatch):
    sharding = [RuleInfo("batch", "derived symbolically", "Shard(0), Replicate -> Shard(0)")]
    monkeypatch.setattr("opkit.sharding.describe.sharding_of", lambda op: sharding)
    result = run("describe", "fake::rms_norm")
    assert result.exit_code == 0
    for pattern in (
        r"Normalises x\.",
        r"mutates\s+x \(inferred by tracing\)",
        r"numpy\s+cpu\s+float32\s+1\s+x\.shape\[-1\] <= 4096\s+yes",
        r"off\s+cuda\s+any\s+0\s+always\s+no",
        r"backward\s+derived\s+from the reference",
        r"fake\s+given\s+ops\.py:12",
        r"vmap\s+not derivable\s+line 7 \[draws\] random numbers",
        r"contract\s+0123abcd",
        r"batch\s+derived symbolically\s+Shard\(0\), Replicate -> Shard\(0\)",
    ):
        assert re.search(pattern, result.stdout), pattern


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("describe", "fake::rms_nrom"), r"did you mean 'fake::rms_norm'"),
        (("describe", "zzz::zzz"), r"(?s)no operator 'zzz::zzz'.*with --module"),
        (("list", "--module", "no.such.module"), r"'no\.such\.module' cannot be imported: ModuleNotFoundError"),
        (("list", "--module", ""), r"cannot be imported"),
        (("demo", "--device", "abacus"), r"'abacus' cannot be used"),
        (("demo", "--device", "meta"), r"'meta' holds no values"),
        (("demo", "--steps", "0"), r"steps is 0\. Give a whole number of at least 1"),
        (("demo", "--steps", "many"), r"--steps"),
        (("describe",), r"(?i)missing argument"),
        (("frobnicate",), r"frobnicate"),
    ],
)
def test_bad_input_is_explained_on_stderr(registered, arguments, complaint):
    result = run(*arguments)
    assert result.exit_code == 2
    assert re.search(complaint, result.stderr)
    assert "Traceback" not in result.output


def test_a_module_that_fails_is_named_with_its_line(registered, module_folder):
    (module_folder / "broken_ops.py").write_text("\nraise RuntimeError('no such library')\n")
    result = run("list", "--module", "broken_ops")
    assert result.exit_code == 2
    assert "RuntimeError: no such library" in result.stderr
    assert "broken_ops.py:2" in result.stderr


def test_demo_refuses_a_file_as_folder(tmp_path):
    (tmp_path / "taken").write_text("")
    result = run("demo", "--out", str(tmp_path / "taken" / "below"))
    assert result.exit_code == 2
    assert "taken is a file" in result.stderr


def test_demo_passes_its_options_on(tmp_path, monkeypatch):
    calls = []
    program = types.ModuleType("opkit.demo")
    program.run = lambda *arguments, options: calls.append((*arguments, options))  # type: ignore[attr-defined]
    program.DemoOptions = lambda backend: backend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "opkit.demo", program)
    monkeypatch.setattr(opkit, "demo", program, raising=False)
    assert (
        run("demo", "--steps", "3", "--device", "cpu", "--out", str(tmp_path), "--backend", "inductor").exit_code == 0
    )
    assert calls == [(3, "cpu", tmp_path, "inductor")]
    assert "'aot'" in run("demo", "--backend", "aot").output


FINDINGS = [doctor.Finding("packages", "torch", "2.13.0 (tested)"), doctor.Finding("gpus", "none", "no device", "note")]


def test_doctor_ends_well_where_nothing_is_missing(monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: FINDINGS)
    result = run("doctor")
    assert result.exit_code == 0
    assert "Nothing that opkit needs is missing" in result.stdout


def test_doctor_says_how_to_mend_what_is_missing(monkeypatch):
    broken = doctor.Finding("compilers", "C", "neither is on PATH", "missing", "apt-get install gcc")
    monkeypatch.setattr(doctor, "examine", lambda: [*FINDINGS, broken])
    result = run("doctor")
    assert result.exit_code == 1
    assert "apt-get install gcc" in result.stdout
    assert "Missing: 1" in result.stdout


def test_main_is_the_console_script(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["opkit", "--help"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert "doctor" in capsys.readouterr().out


def test_a_finding_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FINDINGS[0].value = "other"  # type: ignore[misc]


OPERATORS = """
import opkit
from torch import Tensor

@opkit.custom_op("cli_test::double")
def double(x: Tensor) -> Tensor:
    "Twice x."
    return x * 2
"""


@pytest.fixture
def operator_module(module_folder):
    (module_folder / "cli_test_ops.py").write_text(OPERATORS)
    yield "cli_test_ops"
    opkit.remove("cli_test::double")


def test_an_operator_is_listed_and_described(operator_module, module_folder):
    command = ["-m", "opkit", "list", "--module", operator_module]
    listed = fresh_process.run(command, cwd=module_folder).stdout  # by itself: here are all other tests' too
    assert "cli_test::double" in listed
    described = run("describe", "cli_test::double", "--module", operator_module)
    assert described.exit_code == 0
    for text in ("Twice x.", "Tensor x", "backward", "derived", opkit.get("cli_test::double").describe().contract_hash):
        assert text in described.stdout
    assert "Shard(0) -> Shard(0)" in described.stdout


def test_a_misspelt_operator_brings_the_nearest_names(operator_module):
    result = run("describe", "cli_test::duoble", "--module", operator_module)
    assert result.exit_code == 2
    assert "Did you mean cli_test::double?" in result.stderr


def test_version():
    result = run("--version")
    assert (result.exit_code, result.output) == (0, f"opkit {opkit.__version__}\n")


def test_modules_of_the_package_are_imported_when_they_are_named():
    assert fresh_process.run(["-c", "import opkit; print(opkit.nn.__name__, opkit.masks.__name__)"]).stdout == (
        "opkit.nn opkit.masks\n"
    )
