"""Scripts of failures: each runs in a fresh process, in another folder, and says what the check said."""

import json
import runpy
import sys

import pytest
import torch

import opkit
from opkit.contract.report.repro import written
from opkit.testing import Case, TensorCase, load, replay, tensor

FACTOR = 2.0
N = (tensor("n"),)
torch.library.define("opkit_test_repro::here", "(Tensor x) -> Tensor")


@torch.library.impl("opkit_test_repro::here", "CPU")
def _here(x):
    return x + 1


@torch.library.register_fake("opkit_test_repro::here")
def _here_fake(x):
    return torch.empty_like(x)


def plain(x):
    return x * FACTOR


def twice(x):
    return scaled(x, 2)


def scaled(x, by):
    return x * by


def script_of(op, reference, name="numbers.reference", args=N):
    report = opkit.check(op, args=args, reference=reference, properties=[name], database=False, max_examples=10)
    assert report.failures, str(report)
    return report.failures[0].repro


def made_by_a_factory(by):
    @torch.library.custom_op("opkit_test_repro::factory", mutates_args=())
    def factory(x: torch.Tensor) -> torch.Tensor:
        return scaled(x, by)

    @factory.register_fake
    def _(x):
        return torch.empty_like(x)

    return factory


RUN = """
import contextlib, io, json, runpy, sys
found = {}
for path in sys.argv[1:]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            code = end.code
        except Exception as error:
            code = f"{type(error).__name__}: {error}"
    found[path.rsplit("/", 1)[-1]] = [code, out.getvalue()]
print(json.dumps(found))
"""


def run(scripts, folder):
    paths = []
    for name, text in scripts.items():
        paths.append(folder / name)
        paths[-1].write_text(text)
    return json.loads(printed(["-c", RUN, *paths], folder).splitlines()[-1])


def printed(arguments, folder):
    import fresh_process  # here, as scripts of failures import this file, and have no folder of tests on their path

    return fresh_process.run(arguments, cwd=folder).stdout


def test_scripts_of_every_kind_of_operator_show_the_failure(tmp_path):
    offset = 3.0

    @opkit.custom_op("opkit_test_repro::closure")
    def closure(x: torch.Tensor) -> torch.Tensor:
        return scaled(x, offset)

    @torch.library.custom_op("opkit_test_repro::local", mutates_args=())
    def local(x: torch.Tensor) -> torch.Tensor:
        return x + offset

    @local.register_fake
    def _(x):
        return torch.empty_like(x)

    library = torch.library.Library("opkit_test_repro", "FRAGMENT")
    library.define("by_library(Tensor x) -> Tensor")
    library.impl("by_library", lambda x: x + offset, "CPU")

    same = torch.clone
    scripts = {
        "script_module.py": script_of(plain, torch.neg),
        "script_torch.py": script_of(torch.add, torch.sub, args=(tensor("n"), tensor("n"))),
        "script_overload.py": script_of(torch.ops.aten.mul.Tensor, torch.sub, args=(tensor("n"), tensor("n"))),
        "script_defined.py": script_of(torch.ops.opkit_test_repro.here.default, same),
        "script_closure.py": script_of(closure, lambda x: scaled(x, FACTOR)),
        "script_local.py": script_of(local, same),
        "script_packet.py": script_of(torch.ops.opkit_test_repro.local, same),
        "script_library.py": script_of(torch.ops.opkit_test_repro.by_library.default, same),
        "script_factory.py": script_of(made_by_a_factory(5.0), twice),
        "script_lambda.py": script_of(lambda x: x + offset, same),
    }
    found = run(scripts, tmp_path)
    wrong = {name: (each, scripts[name]) for name, each in found.items() if each[0] != 1}
    assert not wrong, "\n".join(f"{name}: {each}\n{text}" for name, (each, text) in wrong.items())
    assert all("numbers.reference: the result is" in text for _, text in found.values())


MAIN = """
import ctypes, json, torch, opkit
from opkit.testing import tensor

FACTOR = 3.0

@torch.library.custom_op("opkit_test_repro_main::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR

def crashes(x):
    return ctypes.string_at(0) if x.numel() > 2 else x.clone()

def twice(x):
    return x * 2

def asked(op, name):
    how = {"args": (tensor("n"),), "reference": twice, "properties": [name], "database": False, "max_examples": 10}
    return opkit.check(op, **how).failures[0].repro

if __name__ == "__main__":
    print(json.dumps({"reference.py": asked(scaled, "numbers.reference"), "crash.py": asked(crashes, "memory.crash")}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="crashes are caught in forked processes")
def test_scripts_for_what_a_script_defines_and_for_a_crash_show_the_failure(tmp_path):
    main = tmp_path / "main.py"
    main.write_text(MAIN)
    scripts = json.loads(printed([main], tmp_path).splitlines()[-1])
    found = run(scripts, tmp_path)
    assert [code for code, _ in found.values()] == [1, 1], (found, scripts)
    assert "numbers.reference: the result is" in found["reference.py"][1]
    assert "memory.crash: the call ended the process" in found["crash.py"][1]


def test_a_script_of_a_mended_operator_ends_with_zero(tmp_path):
    file = tmp_path / "my_ops.py"
    file.write_text(
        "import torch\n\ndef op(x):\n    return x + 1\n\nif __name__ == '__main__':\n    raise ValueError\n"
    )
    module = load("my_ops", file)
    text = script_of(module.op, torch.clone)
    file.write_text(file.read_text().replace("x + 1", "x.clone()"))
    found = run({"script.py": text}, tmp_path)
    assert found["script.py"][0] == 0, found
    assert "the property holds" in found["script.py"][1]


def test_what_cannot_be_found_is_to_be_filled_in(tmp_path):
    namespace = {}
    exec("def op(x): return x + 1", namespace)
    path = tmp_path / "script.py"
    path.write_text(script_of(namespace["op"], torch.clone))
    assert "TO FILL IN" in path.read_text()
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code == 2


def test_a_case_is_written_as_a_person_would():
    case = Case((TensorCase((1, 65)), 0.5, None), (("flag", True),))
    assert written(case) == "Case(args=(TensorCase(shape=(1, 65)), 0.5, None), kwargs=(('flag', True),))"
    assert eval(written(case)) == case
    assert eval(written(Case((float("inf"),)))) == Case((float("inf"),))


def test_replay_answers_with_an_exit_code(capsys):
    case = Case((TensorCase((2,)),))
    assert replay(plain, "numbers.reference", case, reference=plain) == 0
    assert replay(plain, "numbers.reference", case, reference=torch.neg) == 1
    assert replay(plain, "numbers.reference", case) == 2
    assert "there is no reference" in capsys.readouterr().out
