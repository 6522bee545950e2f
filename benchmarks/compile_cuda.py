"""Compare ``torch.compile(backend="opkit")`` on a GPU with eager and with Inductor: run times, first calls, memory, errors.

The models are ``GPU_MODELS`` of ``compile_models.py``, with random weights; those of ``transformers`` use its "sdpa" attention.
Training is forward and backward, with the loss inside of the model, without an optimiser, and with dropout off so that results
can be compared. float32 products are not TF32; cuDNN's convolutions are, as torch's defaults say.

Each model, dtype and mode is a case with a process and empty caches of its own, and becomes one line. A cell has::

    ms       a step, waited for: the median of rounds in which the contenders alternate; "~" marks three calls in a
             row, of a case that was stopped before its rounds ended
    s        the first three calls less three later ones; a small function was compiled before, so that imports are not counted.
             CUDA graphs are recorded by the second call. Dynamo has read the model's code before.
    GiB      the peak of a step beyond what was allocated before the contender's first call, by torch's allocator. CUDA graphs
             replay in a pool of their own, so "reduce-overhead" has none.
    error    of the loss or the logits; in training also the largest of the gradients of parameters. It is the norm of the
             difference relative to the norm, compared with eager in float32 (of bfloat16) or float64 (of float32). A gradient
             below a thousandth of all is relative to that thousandth. "!" marks more than three times eager's error and two
             units in the last place of the dtype.

Dynamo's graphs and graph breaks follow, then opkit's kernels, calls of torch and fallbacks (graphs or parts in eager mode)::

    python benchmarks/compile.py --device cuda [--models llama,bert] [--modes training] [--dtypes bfloat16] [--contenders opkit]
        [--all] [--part 1/3] [--seconds 500] [--json FILE]
    python benchmarks/compile.py --device cuda --from FILE FILE

``--part`` and ``--seconds`` split a long run; ``--from`` prints the table of all its files. ``--jobs 6`` compiles six cases at
once and then measures one after the other; the times of first calls are left out then. ``--small --device cpu`` tries everything
on tiny models.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch
from compile_backends import EAGER
from compile_cuda_case import BUDGET, CONTENDERS, MIN_ROUNDS, OURS, Row
from compile_models import GPU_MODELS, TRANSFORMERS
from compile_parts import dtype_of

PEERS = [name for name in CONTENDERS if name not in (EAGER, OURS)]
DTYPES, MODES = ("bfloat16", "float32"), ("inference", "training")
CHILD = Path(__file__).with_name("compile_cuda_case.py")
LEAST_SECONDS = 60  # that a case may take, even where less of ``--seconds`` is left

# ---- all cases -------------------------------------------------------------------------------------------------------


def case(options: argparse.Namespace, model: str, dtype: str, mode: str, limit: float) -> Row:
    """Measure a case in a process of its own; what it wrote before it crashed or ran too long counts."""
    row: Row = {"model": model, "dtype": dtype, "mode": mode, "contenders": {}}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "OPKIT_CACHE_DIR": "opkit"}
        env = os.environ | {key: str(folder / value) for key, value in caches.items()}
        env |= {"TMPDIR": name, "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
        how = {"model": model, "dtype": dtype, "mode": mode, "contenders": options.contenders, "rounds": options.rounds}
        how |= {"small": options.small, "device": options.device, "lock": options.lock}
        question = json.dumps([str(folder / "row"), how])
        command = [sys.executable, str(CHILD), question]
        with (folder / "log").open("w") as log:  # no pipe: Inductor's workers that outlive the process would hold it
            try:
                done = subprocess.run(command, stdout=log, stderr=log, env=env, timeout=limit)
                problem = _last(folder / "log", done.returncode) if done.returncode else ""
            except subprocess.TimeoutExpired:
                problem = f"stopped after {limit:.0f} s"
        if (folder / "row").exists():
            row = json.loads((folder / "row").read_text(encoding="utf-8"))
    return row | ({"failed": problem} if problem else {})


def _last(file: Path, code: int) -> str:
    lines = [line for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"exit status {code}: {lines[-1].strip()[:300] if lines else 'no message'}"


def measured(options: argparse.Namespace) -> Iterator[Row]:
    """Measure the chosen cases, while there is time."""
    start = time.perf_counter()
    models = [name for name in options.models if name not in TRANSFORMERS or importlib.util.find_spec("transformers")]
    if left_out := [name for name in options.models if name not in models]:
        print(f"{', '.join(left_out)}: left out, the package transformers is missing", flush=True)
    cases = [(model, dtype, mode) for model in models for dtype in options.dtypes for mode in options.modes]
    number, parts = map(int, options.part.split("/"))
    cases = cases[number - 1 :: parts]
    for done in range(0, len(cases), options.jobs):
        left = options.seconds - (time.perf_counter() - start)
        if left <= 0:
            print(f"not measured, the time is over: {'; '.join(' '.join(case) for case in cases[done:])}", flush=True)
            return
        limit = min(options.limit * options.jobs, max(left, LEAST_SECONDS))
        with ThreadPoolExecutor(options.jobs) as pool, tempfile.NamedTemporaryFile() as lock:
            options.lock = lock.name if options.jobs > 1 else ""
            rows = [pool.submit(case, options, *each, limit=limit) for each in cases[done : done + options.jobs]]
            for row in as_completed(rows):
                yield _written(row.result(), options.json)


def _written(row: Row, path: Path | None) -> Row:
    if path:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return row


# ---- the table -------------------------------------------------------------------------------------------------------


def show(rows: Iterator[Row], contenders: list[str]) -> None:
    """Print a line for each row as it comes, in Markdown, and then the geometric means."""
    print("| model | dtype | mode |", *(f"{name} |" for name in contenders), "compiled |")
    print("| --- | --- | --- |", "---: |" * len(contenders), "--- |", flush=True)
    seen = []
    for row in rows:
        seen.append(row)
        found = row["contenders"]
        rounding = torch.finfo(dtype_of(row["dtype"])).eps
        cells = [_cell(found.get(name, {}), found.get(EAGER, {}), rounding) for name in contenders]
        cells = [row["model"], row["dtype"], row["mode"], *cells, _compiled(found)]
        print("|", " | ".join(cells), "|", flush=True)
        failed = {"": row.get("failed")} | {name: values.get("failed") for name, values in found.items()}
        for text in [f"{name} failed: {why}" for name, why in failed.items() if why] + _reasons(found):
            print("   ", text.strip(), flush=True)
    machines = {f"{row['device']}, torch {row['torch']}" for row in seen if "device" in row}
    print("", *sorted(machines), sep="\n")
    for name, others in (("eager", [EAGER]), ("the best of Inductor", PEERS)):
        _show_means(seen, name, others)


def _cell(values: Row, eager: Row, rounding: float) -> str:
    if "ms" in values:
        texts = [f"{_ms(values):.3f} ms"]
    elif "failed" in values or "steady" not in values:
        texts = ["failed" if "failed" in values else "-"]
    else:
        texts = [f"~{1e3 * values['steady']:.3f} ms"]
    texts += [f"{values['first']:.1f} s"] if "first" in values else []
    texts += [f"{values['gib']:.2f} GiB"] if "gib" in values else []
    for key in ("error", "gradients"):
        if key in values:
            is_usual = values[key] <= 3 * eager.get(key, math.inf) + 2 * rounding
            texts.append(f"{values[key]:.0e}{'' if is_usual else '!'}")
    return ", ".join(texts)


def _ms(values: Row) -> float:
    return statistics.median(values["ms"])


def _compiled(found: dict[str, Row]) -> str:
    """Return what Dynamo captured for a contender, and what opkit made of it."""
    name = OURS if OURS in found else next(iter(PEERS))
    values = found.get(name, {})
    return ", ".join(
        f"{key} {values[key]}" for key in ("graphs", "breaks", "kernels", "calls", "fallbacks") if key in values
    )


def _reasons(found: dict[str, Row]) -> list[str]:
    return [f"fallback: {reason}" for reason in found.get(OURS, {}).get("reasons", ())]


def _show_means(rows: list[Row], name: str, others: list[str]) -> None:
    """Print the geometric means of opkit's times relative to the fastest of ``others``."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        times = {key: _ms(values) for key, values in row["contenders"].items() if "ms" in values}
        peers = [times[key] for key in others if key in times]
        if OURS in times and peers:
            for group in ("all", f"{row['dtype']} {row['mode']}"):
                ratios.setdefault(group, []).append(times[OURS] / min(peers))
    texts = [f"{group} {statistics.geometric_mean(each):.3f} ({len(each)})" for group, each in ratios.items()]
    print(f"opkit's time / {name}, geometric means: {', '.join(texts) or 'none'}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    names = {"models": GPU_MODELS, "dtypes": DTYPES, "modes": MODES, "contenders": CONTENDERS}
    for name, known in names.items():
        default = [each for each in known if each != "max-autotune"]
        parser.add_argument(f"--{name}", type=functools.partial(_chosen, [*known]), default=default)
    parser.add_argument("--all", action="store_true", help="all contenders, also Inductor's max-autotune")
    parser.add_argument(
        "--rounds", type=int, default=15, help=f"at most; {BUDGET:.0f} s of them, but at least {MIN_ROUNDS}"
    )
    parser.add_argument("--part", default="1/1", help="2/3: the second of three parts of the cases")
    parser.add_argument("--jobs", type=int, default=1, help="cases that are compiled at once")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no further case is started")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which a case is stopped")
    parser.add_argument("--small", action="store_true", help="tiny models, which say nothing of speed")
    parser.add_argument("--json", type=Path, help="where a line is added for each case")
    parser.add_argument("--from", dest="earlier", type=Path, nargs="*", help="files of --json, instead of measuring")
    options = parser.parse_args()
    options.contenders = [*CONTENDERS] if options.all else options.contenders
    return options


def _chosen(known: list[str], text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(known):
        raise argparse.ArgumentTypeError(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return names


def main() -> None:
    """Print the table and the means."""
    options = _options()
    if options.earlier:
        rows = [json.loads(line) for path in options.earlier for line in path.read_text(encoding="utf-8").splitlines()]
        show(iter(rows), [name for name in CONTENDERS if any(name in row["contenders"] for row in rows)])
    else:
        show(measured(options), options.contenders)


if __name__ == "__main__":
    main()
