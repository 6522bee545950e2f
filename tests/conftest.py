"""Which cases run, where what they build is stored, and opkit's settings.

The default run leaves out the cases with a marker of ``LEFT_OUT``. ``--exhaustive`` runs them too, and ``-m`` those whose marker
it names. Of the cases of a test with the marker ``sweep`` it keeps a few (see :func:`representatives`): the others get the
marker ``exhaustive``.
"""

import gc
import itertools
import logging
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

# Workers share the cores: each computes with two threads, and none spins while it waits. torch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Inductor compiles nothing, for each folder of its cache, to learn whether vectors work.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import torch

ROOT = Path(__file__).parents[1]
# `python -m pytest` puts the checkout first on the path, without the compiled part that an installed opkit has.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != ROOT]

try:
    import opkit._core  # noqa: F401
    from opkit import config
except ImportError as error:
    raise pytest.UsageError(f"opkit is not installed ({error}). Run `pip install '.[test]'` in {ROOT}.") from error

# pytest adds its handlers to loggers that do not propagate; with a handler here, torch logs each graph and guard (TORCH_TRACE).
logging.getLogger("torch.__trace").propagate = True
# Dynamo flushes the CPU's caches to time the guards of each frame, which takes a third of a small compilation.
torch._C._dynamo.guards.profile_guard_manager = lambda *arguments: 0.0

LEFT_OUT = ("exhaustive", "emulated", "build", "gpu")
_CHUNK = 20  # consecutive cases that run in one shard, which share what their fixtures build


def pytest_addoption(parser):
    group = parser.getgroup("opkit")
    group.addoption("--exhaustive", action="store_true", help="run all cases, not only those of the default run")
    text = "run part K of N of the cases that the default run leaves out"
    group.addoption("--shard", metavar="K/N", type=_shard, help=text)


def _shard(text):
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(text)
    return int(match[1]), int(match[2])


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        return
    # Processes share what they compile, and nothing of an earlier run.
    folder = tempfile.mkdtemp(prefix="opkit-tests-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    for variable in ("OPKIT_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        os.environ[variable] = os.path.join(folder, variable.lower())
        os.mkdir(os.environ[variable])


def pytest_report_header(config):
    return f"left out: cases marked {', '.join(left_out(config)) or 'by none'} (run them by -m MARKER, or all by --exhaustive)"


def left_out(config):
    """The markers whose cases this run leaves out."""
    if config.getoption("exhaustive") or config.getoption("shard"):
        return []
    named = re.findall(r"\w+", config.getoption("markexpr"))
    return [marker for marker in LEFT_OUT if marker not in named]


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # modules and cases stay: full collections, of which some tests make many, need not visit them


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """As many workers as cores, and no more than find room on the GPU, if it is what they need."""
    workers = os.cpu_count()
    if torch.cuda.is_available() and "gpu" not in left_out(config):
        workers = min(workers, torch.cuda.get_device_properties(0).total_memory // (6 << 30))
    return workers


def pytest_runtest_teardown(item):
    if has_marker(item, "gpu") and torch.cuda.is_available():
        torch.cuda.empty_cache()  # for the other workers


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before -m reads the markers, and before cases are shuffled
def pytest_collection_modifyitems(config, items):
    for _, cases in itertools.groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        mark_exhaustive(list(cases))
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device, and torch finds none")
        for item in items:
            if has_marker(item, "gpu"):
                item.add_marker(skip)
    wanted = items
    if shard := config.getoption("shard"):
        further = [item for item in items if reasons(item, LEFT_OUT)]
        wanted = [item for i, item in enumerate(further) if i // _CHUNK % shard[1] == shard[0] - 1]
    elif leave := left_out(config):
        wanted = [item for item in items if not reasons(item, leave)]
    if len(wanted) < len(items):
        chosen = set(wanted)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = wanted
    return (yield)


def reasons(item, leave):
    """The markers among ``leave`` that a case has. What runs on a GPU is not emulated, if other cases of its test are."""
    return [name for name in leave if has_marker(item, name) and not (name == "emulated" and has_marker(item, "gpu"))]


def has_marker(item, *names):
    return any(item.get_closest_marker(name) is not None for name in names)


def mark_exhaustive(cases):
    """Mark the cases of one test function that say little beyond others, if it is a sweep."""
    sweep = cases[0].get_closest_marker("sweep")
    if sweep is None or not hasattr(cases[0], "callspec"):
        return
    for elsewhere in (False, True):  # cases that cannot run here are chosen from on their own
        alike = [case for case in cases if has_marker(case, "gpu", "skip") is elsewhere]
        chosen = representatives(alike, *sweep.args, **sweep.kwargs)
        for case in alike:
            if case not in chosen:
                case.add_marker(pytest.mark.exhaustive)


def representatives(cases, most=sys.maxsize, keep=None):
    """Few cases that together have every value of every parameter, the first of equals; at most ``most``.

    ``keep`` names values: they are chosen from the cases that have one of these. Cases marked exhaustive are not chosen.
    """
    values = {
        case: {(name, id(value)) for name, value in case.callspec.params.items()}
        for case in cases
        if not has_marker(case, "exhaustive")
        and (keep is None or any(isinstance(v, str) and v in keep for v in case.callspec.params.values()))
    }
    missing = set().union(*values.values())
    chosen = []
    while missing and len(chosen) < most:
        chosen.append(max(values, key=lambda case: len(values[case] & missing)))
        missing -= values[chosen[-1]]
    return chosen


@pytest.fixture
def settings():
    """Give environment variables of opkit other values: ``settings(cache_dir=folder)``."""
    with pytest.MonkeyPatch.context() as patch:

        def change(**values):
            for name, value in values.items():
                patch.setenv(f"OPKIT_{name.upper()}", str(value))
            config.get.cache_clear()

        yield change
    config.get.cache_clear()
