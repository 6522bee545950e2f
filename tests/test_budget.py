"""The tests' own option for slow machines, in tests/conftest.py."""

import shutil
import subprocess
import sys
from pathlib import Path

TESTS = """\
import pytest

pytestmark = pytest.mark.parametrize("case", [pytest.param(0, marks=pytest.mark.gpu), 1, 2])

def test_one(case): pass
def test_two(case): pass
"""


def test_first_cases_come_first_and_what_is_late_is_skipped(child_environment, tmp_path):
    shutil.copy(Path(__file__).parent / "conftest.py", tmp_path)
    (tmp_path / "test_made.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-rs",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--budget",
        "0",
        tmp_path,
    ]
    environment = child_environment | {"CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    shown = [
        line.split()[0].removeprefix("test_made.py::")
        for line in run.stdout.splitlines()
        if line.startswith("test_made.py::")
    ]
    assert shown == ["test_one[1]", "test_two[1]", "test_one[0]", "test_one[2]", "test_two[0]", "test_two[2]"], (
        run.stdout
    )
    assert "had not begun when 0 seconds, the budget, were spent" in run.stdout
    assert "6 skipped" in run.stdout
