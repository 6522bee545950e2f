"""The project's own files: packaging, pinned versions, what is committed."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import opkit
from opkit import compat, doctor

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")


def split(requirement: str) -> tuple[str, str]:
    """``"torch>=2.11; marker"`` as ``("torch", ">=2.11")``."""
    match = re.match(r"([\w.-]+)(?:\[[\w,]+\])?([^;]*)", requirement)
    assert match is not None
    return match[1], match[2].strip()


def pins() -> dict[str, str]:
    lines = [line for line in CONSTRAINTS.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "every line pins one version exactly"
    return dict(line.split("==") for line in lines)


def test_torch_is_no_build_dependency():
    assert {split(each)[0] for each in PROJECT["build-system"]["requires"]} == {"scikit-build-core", "pybind11"}


def test_compiled_code_includes_no_torch_header():
    sources = [*(ROOT / "cpp_ext").rglob("*.cpp"), *(ROOT / "cpp_ext").rglob("*.hpp")]
    assert sources
    for source in sources:
        assert not re.search(r"#include\s*[<\"](torch|ATen|c10)/", source.read_text(encoding="utf-8")), source


def test_wheels_are_built_for_every_python_that_is_supported():
    builds = {each.removesuffix("-*") for each in PROJECT["tool"]["cibuildwheel"]["build"]}
    named = re.findall(r"Python :: (\d)\.(\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert {f"cp{major}{minor}" for major, minor in named} <= builds
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=").replace(".", "")
    assert min(builds, key=lambda name: int(name[3:])) == f"cp{oldest}"


def test_a_release_needs_no_password():
    text = (ROOT / ".github" / "workflows" / "wheels.yml").read_text(encoding="utf-8")
    assert not re.search(r"secrets|password:|token:", text.replace("id-token:", ""))
    before, publish = text.split("\n  publish:\n")
    assert "id-token: write" in publish
    assert "id-token" not in before
    actions = re.findall(r"uses: (\S+)", text)
    assert actions
    assert [each for each in actions if not re.search(r"@(release/)?v\d", each)] == []


def test_doctor_knows_the_runtime_dependencies():
    assert dict(split(each) for each in PROJECT["project"]["dependencies"]) == doctor.REQUIREMENTS


def test_every_dependency_is_pinned():
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [split(each)[0] for group in (PROJECT["project"]["dependencies"], *extras.values()) for each in group]
    assert set(wanted) - {"opkit"} <= pins().keys()


def test_the_pinned_torch_is_the_newest_tested():
    assert compat.release(pins()["torch"]) == compat.NEWEST_TESTED
    assert (
        dict(split(each) for each in PROJECT["project"]["dependencies"])["torch"] == f">={compat.dotted(compat.OLDEST)}"
    )


def test_version_stands_in_one_place():
    assert "version" in PROJECT["project"]["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", opkit.__version__)


def test_package_says_that_it_is_typed():
    assert (ROOT / "opkit" / "py.typed").exists()


def committed() -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name]


def test_what_is_committed_is_text_and_names_no_ones_folders():
    for path in committed():
        content = path.read_bytes() if path.exists() else b""
        assert b"\0" not in content, f"{path} is binary"
        assert not re.search(rb"(?<![\w.])/(home|root|Users)/\w", content), f"{path} names somebody's folder"
