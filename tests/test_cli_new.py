"""``opkit new`` and ``opkit build --wheel``: the package that is written, and wheels of it."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
from typer.testing import CliRunner

from opkit import cli

FILES = {
    ".gitignore", "README.md", "fresh_ops/__init__.py", "fresh_ops/on_gpu.py", "fresh_ops/silu_mul.c", "pyproject.toml",
    "tests/test_fresh_ops.py",
}  # fmt: skip


def run(*arguments):
    return CliRunner().invoke(cli.app, [*map(str, arguments)])


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_package_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("new", "fresh_ops")
    assert result.exit_code == 0, result.output
    project = tmp_path / "fresh_ops"
    assert files(project) == FILES
    for path in project.rglob("*.py"):
        ast.parse(path.read_text())
    assert tomllib.loads((project / "pyproject.toml").read_text())["project"]["name"] == "fresh_ops"
    assert "@NAME@" not in "".join(path.read_text() for path in project.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("My-Ops", "no name for a package"),
        ("../ops", "no name for a package"),
        ("class", "no name for a package"),
        ("json", "a module that is installed"),
        ("there", "exists"),
    ],
)
def test_a_name_that_cannot_be_is_refused(tmp_path, monkeypatch, name, complaint):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    result = run("new", name)
    assert result.exit_code == 2
    assert complaint in result.stderr.replace("\n", " ")
    assert [*tmp_path.rglob("*")] == [tmp_path / "there"]


# ---- wheels ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    caches = {f"{name}_CACHE_DIR": str(tmp_path_factory.mktemp(name)) for name in ("OPKIT", "TRITON")}
    return os.environ | caches | {"OPKIT_BRIDGE": "0"}


def python(folder, environment, *arguments):
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory, environment):
    folder = tmp_path_factory.mktemp("new")
    done = python(folder, environment, "-m", "opkit", "new", "fresh_ops")
    assert done.returncode == 0, done.stderr
    return folder / "fresh_ops"


def wheel_of(project, environment, *options):
    return python(
        project, environment, "-m", "opkit", "build", "--arch", "sm_90", "--wheel", "dist", *options, "fresh_ops"
    )


@pytest.fixture(scope="module")
def wheel(project, environment):
    done = wheel_of(project, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = (project / "dist").iterdir()
    assert str(made.relative_to(project)) in done.stdout
    return made


@pytest.mark.build
def test_the_tests_of_a_new_package_pass(project, environment):
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-k", "numbers or fake or triton"]
    done = python(project, environment | {"PYTHONPATH": _path(environment, project)}, *command)
    assert re.search(r"\b\d\d passed", done.stdout), done.stdout + done.stderr
    assert done.returncode == 0, done.stdout


def _path(environment, *folders):
    return os.pathsep.join([*map(str, folders), *filter(None, [environment.get("PYTHONPATH", "")])])


@pytest.mark.build
def test_a_wheel_has_all_that_was_built_and_is_for_one_platform(project, wheel):
    assert re.fullmatch(r"fresh_ops-0\.1\.0-py3-none-linux_\w+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    packed = {name.partition("_opkit/")[2] for name in names if "_opkit/" in name}
    assert packed == files(project / "fresh_ops" / "_opkit")
    assert any(name.endswith(".cubin") for name in packed)
    assert {"fresh_ops/silu_mul.c", "fresh_ops/on_gpu.py"} <= {*names}


USE = """
import torch, fresh_ops
assert "unpacked" in fresh_ops.__file__
x = torch.randn(4, 16)
assert fresh_ops.silu_mul.select(x, x).kernel == "silu_mul"
torch.testing.assert_close(fresh_ops.silu_mul(x, x), torch.nn.functional.silu(x) * x)
"""


@pytest.mark.build
def test_a_wheel_works_where_there_is_no_compiler(wheel, environment, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "unpacked")
    without = {"PATH": "/nonexistent", "OPKIT_CACHE_DIR": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    path = _path(environment, tmp_path / "unpacked")
    done = python(tmp_path, environment | without | {"PYTHONPATH": path}, "-W", "error", "-c", USE)
    assert done.returncode == 0, done.stderr


@pytest.mark.build
@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (', "_opkit/**/*"', "", r"leaves \d+ of the \d+ files .* out of its wheel.*_opkit/\*\*/\*.\]\} below \[tool"),
        ("setuptools.build_meta", "no_such_backend", r"made no wheel.*build-system\.requires"),
        ("[build-system]", "[build-system", r"pyproject\.toml cannot be read"),
    ],
)
def test_a_project_that_cannot_be_packed_is_refused(project, wheel, environment, tmp_path, old, new, complaint):
    other = shutil.copytree(project, tmp_path / "other", ignore=shutil.ignore_patterns("build", "dist", "*.egg-info"))
    text = (other / "pyproject.toml").read_text()
    (other / "pyproject.toml").write_text(text.replace(old, new))
    done = wheel_of(other, environment)
    assert done.returncode == 1, done.stdout
    assert re.search(complaint, done.stderr, re.DOTALL), done.stderr
    assert not (other / "dist").exists()


@pytest.mark.build
def test_what_an_earlier_build_left_is_not_packed(project, wheel, environment, tmp_path):
    other = shutil.copytree(project, tmp_path / "other")
    (other / "dist" / wheel.name).unlink()
    kernel = other / "fresh_ops" / "silu_mul.c"
    kernel.write_text(kernel.read_text().replace("(1 + expf(-x))", "(2 + expf(-x))"))
    done = wheel_of(other, environment)
    assert done.returncode == 1
    assert "files of an earlier build" in done.stderr
    shutil.rmtree(other / "build")
    assert wheel_of(other, environment).returncode == 0


@pytest.mark.build
def test_triton_kernels_alone_are_for_all_platforms(project, environment, tmp_path):
    other = shutil.copytree(
        project, tmp_path / "other", ignore=shutil.ignore_patterns("_opkit", "build", "dist", "*.egg-info")
    )
    operators = other / "fresh_ops" / "__init__.py"
    operators.write_text(operators.read_text().replace('silu_mul.register_kernel("cpu", on_cpu)\n', ""))
    done = wheel_of(other, environment)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (other / "dist").iterdir()] == ["fresh_ops-0.1.0-py3-none-any.whl"]


def test_a_wheel_needs_a_project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "fresh_single.py").write_text("")
    result = run("build", "--wheel", "dist", "fresh_single")
    assert result.exit_code == 1
    assert "belongs to no project" in result.stderr
    assert "opkit new" in result.stderr
    assert not (tmp_path / "dist").exists()


def test_a_wheel_holds_what_is_in_the_package(tmp_path):
    result = run("build", "--wheel", tmp_path, "--output", tmp_path / "elsewhere", "json")
    assert result.exit_code == 2
    assert "Leave out one of them" in result.stderr.replace("\n", " ")
