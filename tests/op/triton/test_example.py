"""The example of a Triton kernel does what it says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.emulated
def test_the_example_runs(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "triton_kernel.py")]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()[1:5]] == ["sm_80", "sm_90", "sm_100", "gfx942"]
