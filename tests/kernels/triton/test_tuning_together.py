"""Tuning in several threads and processes at once: one measures, the others wait for it, or make do without it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import processes
import pytest
from tuned import BEST, BUCKET, DEVICE, TIMES, Timer, decide, never

import opkit
from opkit.errors import TuningWarning
from opkit.kernels.tuning import records

pytestmark = pytest.mark.usefixtures("settings")


def together(work, count=8):
    barrier, results = threading.Barrier(count), []

    def run():
        barrier.wait()
        results.append(work())

    threads = [threading.Thread(target=run) for _ in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return results


def test_of_several_threads_one_measures():
    timer = Timer()

    def slow(each):
        time.sleep(0.02)
        return timer(each)

    choices = together(lambda: decide(slow))
    assert [choice.config for choice in choices] == [BEST] * 8
    assert timer.calls == [64, 128, 256]


def test_of_several_threads_one_measures_where_nothing_can_be_written(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "triton_tuning").write_text("in the way")
    timer = Timer()
    with pytest.warns(TuningWarning):
        together(lambda: decide(timer))
    assert timer.calls == [64, 128, 256]


# What a child runs: opkit.kernels without torch, which opkit/__init__.py would import.
CHILD = f"""
import sys, time, types, warnings
sys.modules["opkit"] = types.ModuleType("opkit")
sys.modules["opkit"].__path__ = {[str(Path(opkit.__file__).parent)]!r}
from opkit.kernels.tuning import tuning
from opkit.kernels.tuning.configs import Config
from opkit.kernels.tuning.record_format import Identity
assert "torch" not in sys.modules
CONFIGS = [Config({{"BLOCK": block}}, {{"num_warps": 4}}) for block in (64, 128, 256)]
def measure(each):
    print("measuring", each.constexprs["BLOCK"], flush=True)
    time.sleep(float(sys.argv[1]))
    return {TIMES!r}[each.constexprs["BLOCK"]]
print("ready", flush=True); sys.stdin.readline()
chosen = tuning.choose(Identity("demo::rms_norm", "_fwd", "abc"), CONFIGS, {DEVICE!r}, {BUCKET!r}, measure, False)
print("chosen", chosen.constexprs["BLOCK"], flush=True)
"""


def child(tmp_path, seconds):
    command = [sys.executable, "-W", "error", "-c", CHILD, str(seconds)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=os.environ | {"OPKIT_CACHE_DIR": str(tmp_path / "cache")}, **pipes)
    assert process.stdout.readline() == "ready\n"
    return process


def start(*processes):
    for each in processes:
        each.stdin.write("\n")
        each.stdin.flush()


def ended(process):
    output, complaints = process.communicate(timeout=300)
    assert process.returncode == 0, complaints
    return output.splitlines()


def test_of_two_processes_one_measures(tmp_path):
    both = [child(tmp_path, 0.2) for _ in range(2)]
    start(*both)
    outputs = sorted((ended(each) for each in both), key=len)
    assert outputs[0] == ["chosen 128"]
    assert outputs[1] == ["measuring 64", "measuring 128", "measuring 256", "chosen 128"]
    assert decide(never).config is BEST


def test_a_tuner_that_is_killed_makes_way(tmp_path):
    first, second = child(tmp_path, 60), child(tmp_path, 0)
    start(first)
    assert first.stdout.readline() == "measuring 64\n"
    start(second)
    time.sleep(0.3)
    assert second.poll() is None  # it waits
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=300)
    assert ended(second)[-1] == "chosen 128"
    assert decide(never).config is BEST


def test_a_tuner_that_hangs_is_waited_for_no_longer_than_told(settings):
    settings(build_timeout=0.2)
    release = threading.Event()
    holding = threading.Event()

    def hold():
        with records.lock("topic", lambda: None):
            holding.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait(30)
    ticks = []
    with records.lock("topic", lambda: ticks.append(1)):
        assert ticks
    release.set()
    thread.join()


def test_an_error_within_a_lock_is_not_lost():
    with pytest.raises(NotImplementedError), records.lock("topic", lambda: None):
        raise NotImplementedError


RANKS = Path(__file__).with_name("tuning_ranks.py")


@pytest.mark.distributed
def test_the_processes_of_a_job_choose_alike(tmp_path):
    processes.need_gloo()
    cases = ["one_measures", "records_that_differ", "a_process_that_never_asks", "the_one_that_measures_fails"]
    path = os.pathsep.join(filter(None, [str(RANKS.parents[2]), str(RANKS.parent), os.environ.get("PYTHONPATH", "")]))
    found = processes.results_of(RANKS, 2, cases, tmp_path, PYTHONPATH=path)
    assert found == {name: ["", ""] for name in cases}, str(found)
