"""Checks that several processes run together over gloo.

A file of cases has functions with :func:`case`, and ends with ``processes.main()``. Each process writes what came of each case,
"" or the traceback, to a file; it ends at its first failure, and gloo then ends the others.
"""

import datetime
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

import fresh_process
import pytest

LIMIT = 120  # seconds that all cases of one start may take
SECONDS = 60  # that a collective waits for another process
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def results_of(cases, world, names, folder, **variables):
    """What came of each case of a file in each process, whose environment has these variables too."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | variables
    started = [[cases, str(rank), str(world), str(folder), *names] for rank in range(world)]
    children = [fresh_process.start(arguments, environment) for arguments in started]
    end = time.monotonic() + LIMIT
    errors = [_errors_of(child, max(1.0, end - time.monotonic())) for child in children]
    files = [folder / f"{rank}.json" for rank in range(world)]
    found = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    return {
        name: [of.get(name, f"it did not run\n{text[-2000:]}") for of, text in zip(found, errors, strict=True)]
        for name in names
    }


def _errors_of(child, seconds):
    """What a process wrote to its standard error; it is killed if it takes longer."""
    try:
        return child.wait(check=False, timeout=seconds).stderr
    except subprocess.TimeoutExpired as late:
        return late.stderr


def need_gloo():
    """Skip the module that is imported where torch has no gloo."""
    dist = pytest.importorskip("torch.distributed")
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch has no gloo here", allow_module_level=True)


def fixture(cases, test):
    """A fixture: what came, in two processes, of the cases of a file that this run has chosen as ``name`` of a test."""

    @pytest.fixture(scope="module")
    def results(request, tmp_path_factory):
        items = [item for item in request.session.items if item.originalname == test]
        chosen = [item.callspec.params["name"] for item in items if item.get_closest_marker("skip") is None]
        return results_of(cases, 2, chosen, tmp_path_factory.mktemp("processes"))

    return results


def main():
    """Run in each process what the command line says: its rank, how many there are, a folder, and the names of cases."""
    import torch
    import torch.distributed as dist

    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    limit = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=limit)
    results = {}
    for name in sys.argv[4:]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
        try:
            CASES[name](mesh)
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(results))
        if results[name]:
            break
    os._exit(0)  # gloo's threads may wait for a process that ended
