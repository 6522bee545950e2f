"""examples/train_llama.py: losses of several processes are those of one, and runs go on where they ended."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import fresh_process
import processes
import pytest

processes.need_gloo()

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_llama.py"
pytestmark = pytest.mark.distributed


def started(processes, *arguments, more=()):
    """The running example; its output is that of the first process."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *more]
    command = [sys.executable, *torchrun, EXAMPLE, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def losses(process, limit=200):
    out, error = process.communicate(timeout=limit)
    assert process.returncode == 0, error[-3000:]
    return losses_in(out)


def losses_in(out):
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", out)}


def test_a_sequence_on_two_processes():
    """With what torchrun tells its processes, of which these have imported torch."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    common = alone | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environments = [*(common | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"), alone]
    divisions = ("--cp=2", "--cp=2", "--cp=1")
    pairs = zip(divisions, environments, strict=True)
    children = [fresh_process.start([EXAMPLE, "--steps=2", division], given) for division, given in pairs]
    found, _, expected = (losses_in(child.wait(timeout=200).stdout) for child in children)
    assert found == pytest.approx(expected, abs=2e-6)
    assert [*found] == [0, 1]


@pytest.mark.exhaustive
def test_a_killed_process_is_restarted(tmp_path):
    process = started(2, "--cp=2", "--steps=40", f"--checkpoint={tmp_path}", more=["--max-restarts=2"])
    while not (tmp_path / "latest").exists():
        assert process.poll() is None
        time.sleep(0.01)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    found = losses(process)
    assert min(found) > 0
    assert max(found) == 39
    expected = losses(started(1, "--steps=40"))
    assert found == pytest.approx({step: expected[step] for step in found}, abs=2e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "division", [("--fsdp=2", "--cp=2"), ("--fsdp=2", "--tp=2"), ("--tp=2", "--cp=2")], ids=" ".join
)
def test_a_run_goes_on_with_fewer_processes(division, tmp_path):
    expected = losses(started(1, "--steps=8"))
    first = losses(started(4, *division, "--steps=7", f"--checkpoint={tmp_path}"))
    rest = losses(started(1, "--steps=8", f"--checkpoint={tmp_path}"))
    assert (min(first), max(first)) == (0, 6)
    assert (min(rest), max(rest)) == (5, 7)
    assert first == pytest.approx({step: expected[step] for step in first}, abs=2e-5)
    assert rest == pytest.approx({step: expected[step] for step in rest}, abs=2e-5)
