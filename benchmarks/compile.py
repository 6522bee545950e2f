"""Compare ``torch.compile`` with opkit's backend with eager and Inductor: compile times, run times, memory, errors.

Six models (``compile_models.py``), inference and training, float32 and bfloat16, ``OMP_NUM_THREADS`` threads (two). What is
measured::

    cold      the first call less a later one, in a new process with empty caches; torch and transformers are imported before
    warm      the same in another new process with the caches that the cold one left
    run       a call: eager and all backends alternate in one process; medians of many rounds; of one thread its own time
    memory    the peak of a step beyond weights and code, by the process's resident set and by torch's allocator
    numbers   errors of loss and gradients compared with eager float64
    depth     cold compile times of 12, 24 and 48 narrow layers
    kernels   single kernels, compared with the bandwidth that a copy reaches in the same rounds
    shapes    recompiles over twenty batches and lengths

The floors are Dynamo alone and Dynamo with AOTAutograd ("aot": Inductor's decompositions and partitioner, and no compiler)::

    python benchmarks/compile.py [--backend opkit] [--what cold,run] [--models bert,gpt2] [--modes training] [--json FILE]
    python benchmarks/compile.py --from FILE --markdown tables.md

A backend that does not exist is left out with a line that says why. ``--small`` tries everything on tiny models.
``--device cuda`` runs ``compile_cuda.py`` instead, whose options are others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import compile_cuda
import torch
from compile_backends import DYNAMO, EAGER, FLOOR, missing
from compile_kernels import MEMORY as KEPT
from compile_models import MODELS, TRANSFORMERS

THREADS = int(os.environ.get("OMP_NUM_THREADS", 2))
DTYPES, MODES = ("float32", "bfloat16"), ("inference", "training")
DEPTHS = (12, 24, 48)
PEER = "inductor"
_CORES = "OPKIT_BENCHMARK_CORES"
_MEMORY = {"memory": {"MALLOC_MMAP_THRESHOLD_": "65536"}, "kernel": KEPT}  # large blocks go back at once; or stay
_thread = threading.local()

Row = dict[str, Any]


def parts() -> dict[str, Callable[..., Any]]:
    """What a child process can run, by name."""
    import compile_kernels
    import compile_parts
    import compile_shapes

    return {
        "first": compile_parts.first, "run": compile_parts.run, "memory": compile_parts.memory,
        "numbers": compile_parts.numbers, "kernel": compile_kernels.measure, "sweep": compile_shapes.sweep,
    }  # fmt: skip


def child(part: str, folder: Path, **how: Any) -> Any:
    """A part in a process of its own, whose caches are in ``folder``; where it fails, the last line of its error."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "OPKIT_CACHE_DIR": str(folder / "opkit")}
    own = {"OMP_NUM_THREADS": str(THREADS), "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    own |= {_CORES: ",".join(map(str, cores))} if (cores := getattr(_thread, "cores", None)) else {}
    own |= _MEMORY.get(part, {})
    command = [sys.executable, __file__, "--child", json.dumps([part, how])]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | caches | own)
    if done.returncode:
        return {
            "error": next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")[:300]
        }
    return json.loads(done.stdout.splitlines()[-1])


def answer(question: str) -> None:
    """Be the child: print the answer as JSON."""
    import transformers  # noqa: F401  before any clock starts

    warnings.simplefilter("ignore")
    if _CORES in os.environ:
        os.sched_setaffinity(0, map(int, os.environ[_CORES].split(",")))
    torch.set_num_threads(THREADS)
    part, how = json.loads(question)
    print(json.dumps(parts()[part](**how)))


def cold_and_warm(options: argparse.Namespace) -> Iterator[Row]:
    """Compile times with empty caches, and then with what those runs left there."""
    for model, mode, dtype in _cases(options):
        for backend in (DYNAMO, FLOOR, *options.backends):
            where = {"model": model, "mode": mode, "dtype": dtype, "backend": backend}
            for _ in range(options.repeats):
                with tempfile.TemporaryDirectory() as folder:
                    for what in ("cold", "warm"):
                        if what in options.what or what == "cold":
                            found = child("first", Path(folder), **where, small=options.small)
                            yield {"what": what, **where, **found}


def runs(options: argparse.Namespace) -> Iterator[Row]:
    """Run times; all backends in one process."""
    for model, mode, dtype in _cases(options):
        where = {"model": model, "mode": mode, "dtype": dtype}
        backends = [EAGER, *options.backends]
        found = _alone("run", **where, backends=backends, rounds=options.rounds, small=options.small)
        yield {"what": "run", **where, **(found if "error" in found else {"seconds": found})}


def memories(options: argparse.Namespace) -> Iterator[Row]:
    """Peak memory; a process each."""
    for model, mode, dtype in _cases(options):
        for backend in (EAGER, *options.backends):
            where = {"model": model, "mode": mode, "dtype": dtype, "backend": backend}
            yield {"what": "memory", **where, **_alone("memory", **where, small=options.small)}


def errors(options: argparse.Namespace) -> Iterator[Row]:
    """Errors compared with float64."""
    for model in options.models:
        for dtype in options.dtypes:
            for backend in (EAGER, *options.backends):
                where = {"model": model, "dtype": dtype}
                found = _alone("numbers", **where, backends=[backend], small=options.small)
                yield {"what": "numbers", **where, "backend": backend, **found.get(backend, found)}


def depths(options: argparse.Namespace) -> Iterator[Row]:
    """Compile times by depth, of narrow models in float32."""
    for model in [name for name in options.models if name in TRANSFORMERS]:
        for mode in options.modes:
            for layers in DEPTHS:
                for backend in (DYNAMO, FLOOR, *options.backends):
                    where = {"model": model, "mode": mode, "dtype": "float32", "backend": backend}
                    found = _alone("first", **where, small=True, layers=layers)
                    yield {"what": "depth", **where, "layers": layers, **found}


def kernels(options: argparse.Namespace) -> Iterator[Row]:
    """Single kernels."""
    from compile_kernels import KERNELS

    for name in KERNELS:
        for dtype in options.dtypes:
            found = _alone("kernel", name=name, dtype=dtype, backends=[EAGER, *options.backends], rounds=options.rounds)
            yield {"what": "kernels", "kernel": name, "dtype": dtype, **found}


def shapes(options: argparse.Namespace) -> Iterator[Row]:
    """Recompiles over a sweep of sizes, of small models that take tokens."""
    for model, mode, dtype in _cases(options):
        if model in ("bert", "gpt2", "llama", "demo"):
            for backend in options.backends:
                where = {"model": model, "mode": mode, "dtype": dtype, "backend": backend}
                yield {"what": "shapes", **where, **_alone("sweep", **where)}


def _cases(options: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    for model in options.models:
        for mode in options.modes:
            for dtype in options.dtypes:
                yield model, mode, dtype


def _alone(part: str, **how: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return child(part, Path(folder), **how)


_CASE = ("models", "modes", "dtypes")
ALONG = {
    cold_and_warm: _CASE, runs: _CASE, memories: _CASE, shapes: _CASE, errors: ("models", "dtypes"),
    depths: ("models", "modes"), kernels: ("dtypes",),
}  # fmt: skip
"""The options by whose values the work of a function is shared out among jobs."""

WHAT: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "cold": cold_and_warm, "warm": cold_and_warm, "run": runs, "memory": memories, "numbers": errors, "depth": depths,
    "kernels": kernels, "shapes": shapes,
}  # fmt: skip


def measure(options: argparse.Namespace) -> list[Row]:
    """All selected rows; written to ``--json`` as they come, so that an interrupted run is not lost."""
    rows: list[Row] = []
    for row in _rows(options):
        rows.append(row)
        print(_short(row), file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps(_record(rows)) + "\n", encoding="utf-8")
    return rows


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    functions = dict.fromkeys(WHAT[what] for what in options.what)
    if options.jobs == 1:
        for function in functions:
            yield from function(options)
        return
    work = [(function, part) for function in functions for part in _parts(options, ALONG[function])]
    cores = sorted(os.sched_getaffinity(0))
    places: queue.Queue[list[int]] = queue.Queue()
    for number in range(max(1, min(options.jobs, len(cores) // THREADS))):
        places.put(cores[number * THREADS : (number + 1) * THREADS])

    def one(function: Callable[[argparse.Namespace], Iterator[Row]], part: argparse.Namespace) -> list[Row]:
        _thread.cores = places.get()
        try:
            return list(function(part))
        finally:
            places.put(_thread.cores)

    with ThreadPoolExecutor(places.qsize()) as pool:
        for done in as_completed([pool.submit(one, *each) for each in work]):
            yield from done.result()


def _parts(options: argparse.Namespace, along: tuple[str, ...]) -> Iterator[argparse.Namespace]:
    """The options with one value each for those named."""
    for values in itertools.product(*(getattr(options, name) for name in along)):
        chosen = {name: [value] for name, value in zip(along, values, strict=True)}
        yield argparse.Namespace(**{**vars(options), **chosen})


def _short(row: Row) -> str:
    return " ".join(_said(value) for value in row.values())[:200]


def _said(value: Any) -> str:
    if isinstance(value, dict):
        medians = {key: statistics.median(each) for key, each in value.items()}
        return " ".join(f"{key} {median:.4g}" for key, median in medians.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _record(rows: list[Row]) -> dict[str, Any]:
    machine = {"cpu": platform.processor() or platform.machine(), "threads": THREADS, "torch": torch.__version__}
    return {"machine": machine, "rows": rows}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("what", WHAT), ("models", MODELS), ("modes", MODES), ("dtypes", DTYPES), ("backends", (PEER, "opkit")),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=lambda text: text.split(","), default=[*default])
    parser.add_argument("--backend", help="instead of opkit; Inductor is measured too")
    parser.add_argument("--rounds", type=int, default=15, help="of run times and kernels")
    parser.add_argument("--repeats", type=int, default=3, help="of cold and warm compiles")
    parser.add_argument("--jobs", type=int, default=1, help="cases at once, each on two cores of its own")
    parser.add_argument("--small", action="store_true", help="tiny models, which say nothing of speed")
    parser.add_argument("--json", type=Path, help="where the rows go, as they come")
    parser.add_argument(
        "--from", dest="earlier", type=Path, nargs="*", help="rows of earlier runs, instead of measuring"
    )
    parser.add_argument("--markdown", type=Path, help="where the tables go, as markdown")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def _chosen(options: argparse.Namespace) -> None:
    """Selected backends that exist; unknown names end the run."""
    if options.backend:
        options.backends = [PEER, options.backend]
    for name, known in (("what", WHAT), ("models", MODELS), ("modes", MODES), ("dtypes", DTYPES)):
        if unknown := set(getattr(options, name)) - set(known):
            raise SystemExit(f"--{name}: there is no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    reasons = {name: missing(name) for name in options.backends}
    for name, reason in reasons.items():
        if reason:
            print(f"{name} is left out: {reason}", file=sys.stderr)
    options.backends = [name for name in options.backends if reasons[name] is None]


def main() -> None:
    """Print the tables and one JSON line; with ``--child``, be one of the parts; with ``--device``, run compile_cuda.py."""
    if any(argument.startswith("--device") for argument in sys.argv):
        compile_cuda.main()
        return
    options = _options()
    if options.child:
        answer(options.child)
        return
    from compile_report import figures, markdown, show

    _chosen(options)
    records = [json.loads(path.read_text(encoding="utf-8")) for path in options.earlier or ()] or [
        _record(measure(options))
    ]
    machine, rows = records[0]["machine"], [row for record in records for row in record["rows"]]
    tables = figures(rows, ours=options.backend or "opkit", peer=PEER)
    show(tables)
    if options.markdown:
        options.markdown.write_text(markdown(tables, machine), encoding="utf-8")
    print(json.dumps({table.name: table.summary for table in tables}))


if __name__ == "__main__":
    main()
