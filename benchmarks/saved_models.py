"""How fast do saved models load and run? opkit.export, AOTInductor with freezing, and ONNX Runtime (CPUs).

Each way loads in a process of its own, three times: the time to load, of the first call, the memory, medians. Then one process
for each way is called in turn. "opkit.runtime" is the file of "opkit" without torch. ``--device cuda`` leaves it and ONNX Runtime
out. ONNX Runtime needs ``onnx``, ``onnxscript`` and ``onnxruntime``; BERT and GPT-2 need ``transformers``.

    python benchmarks/saved_models.py [--models bert,resnet50,gpt2] [--device cpu] [--batch 1] [--small]
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compile_models import task

FILES = {"opkit": "model.opk", "opkit.runtime": "runtime.opk", "AOTInductor": "model.pt2", "ONNX Runtime": "model.onnx"}
LIBRARIES = {
    "opkit": "opkit",
    "opkit.runtime": "opkit.runtime",
    "AOTInductor": "torch._inductor",
    "ONNX Runtime": "onnxruntime",
}
COLUMNS = ["model", "way", "export s", "load s", "first ms", "call ms", "of AOTInductor", "file MiB", "private MiB"]
PIPES: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
PAUSE = 0.1  # seconds between calls, in which threads that wait for work go to sleep
LENGTHS = {"resnet50": 224}


def build(way: str, model: str, folder: Path, options: argparse.Namespace) -> float:
    """Save a model; return the seconds that it took."""
    made = _task(model, options)
    example = next(iter(made.inputs.values()))
    torch.save((example, made.step()()), folder / "call.pt")
    module = Logits(made.module)
    begin = time.perf_counter()
    with torch.no_grad():
        if way in ("opkit", "opkit.runtime"):
            import opkit

            opkit.export(module, (example,), path=folder / FILES[way])
        elif way == "AOTInductor":
            program = torch.export.export(module, (example,), strict=False)
            settings = {
                "freezing": options.device == "cpu"
            }  # on an H200 with torch 2.11 such archives ended the process
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(folder / FILES[way]), inductor_configs=settings
            )
        else:
            torch.onnx.export(module, (example,), folder / FILES[way], input_names=["x"], dynamo=True)
    return time.perf_counter() - begin


class Logits(torch.nn.Module):
    """The tensor of a model's results: AOTInductor returns no instance of a class that is not imported."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of the model's one argument."""
        return self.module(x)["logits"]


def _task(model: str, options: argparse.Namespace) -> Any:
    shape = None if options.small else (options.batch, LENGTHS.get(model, options.length))
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    return task(model, "inference", dtype, small=options.small, shape=shape, device=options.device)


def load(way: str, folder: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function of a saved model."""
    path = str(folder / FILES[way])
    if way == "opkit":
        import opkit

        return opkit.load(path)
    if way == "opkit.runtime":
        import opkit.runtime

        runtime = opkit.runtime.load(path)
        return lambda x: torch.from_dlpack(runtime(x))
    if way == "AOTInductor":
        return torch._inductor.aoti_load_package(path)
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


def _synchronised(function: Callable[[], Any]) -> Any:
    result = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result


def first(way: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Load a model and call it once, in this process."""
    x, expected = torch.load(folder / "call.pt")
    assert importlib.import_module(LIBRARIES[way]).__name__  # imports what loading needs
    before = _resident()
    begin = time.perf_counter()
    run = load(way, folder)
    loaded = time.perf_counter()
    result = _synchronised(lambda: run(x))
    called = time.perf_counter()
    torch.testing.assert_close(result, expected, atol=0.1, rtol=0.1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"load": loaded - begin, "first": called - loaded, "resident": _resident() - before, "peak": peak}


def _resident() -> float:
    """Return the resident memory in MiB that is not pages of files."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return int(fields["RssAnon"].split()[0]) / 1024


def serve(way: str, folder: Path) -> None:
    """Load a model, and call it once for each line of input; print the seconds of each call."""
    x, _ = torch.load(folder / "call.pt")
    run = load(way, folder)
    for _line in sys.stdin:
        begin = time.perf_counter()
        _synchronised(lambda: run(x))
        print(time.perf_counter() - begin, flush=True)


def steady(ways: list[str], model: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Call all ways in turn, each in a process of its own; return the median seconds of each."""
    servers = {way: subprocess.Popen(_command("serve", way, model, folder, options), **PIPES) for way in ways}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(options.rounds + 5):
        for way, server in [*servers.items()][:: 1 if number % 2 else -1]:  # none always follows the same one
            time.sleep(PAUSE)
            server.stdin.write("\n")
            server.stdin.flush()
            seconds = float(server.stdout.readline())
            if number >= 5:
                times[way].append(seconds)
    for server in servers.values():
        server.stdin.close()
        server.wait()
    return {way: statistics.median(each) for way, each in times.items()}


def main() -> None:
    """Print a table, and the same as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="bert,resnet50,gpt2")
    parser.add_argument("--ways", default="")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--child", nargs=3, metavar=("STEP", "WAY", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    ways = (
        options.ways.split(";") if options.ways else [*FILES] if options.device == "cpu" else ["opkit", "AOTInductor"]
    )
    if options.child:
        step, way, folder = options.child
        steps: dict[str, Callable[[], Any]] = {
            "build": lambda: build(way, options.models, Path(folder), options),
            "first": lambda: first(way, Path(folder), options),
            "serve": lambda: serve(way, Path(folder)),
        }
        print(json.dumps(steps[step]()))
        return
    rows = [row for model in options.models.split(",") for row in _rows(model, ways, options)]
    for row in [COLUMNS, *rows]:
        print("".join(f"{each!s:>{width}}" for each, width in zip(row, (10, 14, *[15] * 7), strict=True)))
    print(json.dumps({"columns": COLUMNS, "rows": rows}))


def _rows(model: str, ways: list[str], options: argparse.Namespace) -> list[list[Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        built, loads = dict[str, Any](), dict[str, list[Any]]()
        for way in [*ways]:
            try:
                built[way] = _child("build", way, model, folder, options)
                loads[way] = [_child("first", way, model, folder, options) for _ in range(3)]
            except RuntimeError as error:  # the other ways are still to be measured
                print(error, file=sys.stderr)
                ways = [each for each in ways if each != way]
        calls = steady(ways, model, folder, options)
        return [
            [
                model, way, round(built[way], 1), _median(loads[way], "load"), round(_median(loads[way], "first") * 1e3, 1),
                round(calls[way] * 1e3, 2), round(calls[way] / calls.get("AOTInductor", calls[way]), 3),
                round(_size(folder, way) / 2**20, 1), round(_median(loads[way], "resident")),
            ]
            for way in ways
        ]  # fmt: skip


def _median(of: list[dict[str, float]], name: str) -> float:
    return round(statistics.median(each[name] for each in of), 3)


def _size(folder: Path, way: str) -> int:
    return sum(path.stat().st_size for path in folder.glob(f"{FILES[way]}*"))


def _command(step: str, way: str, model: str, folder: Path, options: argparse.Namespace) -> list[str]:
    settings = ["--device", options.device, "--batch", str(options.batch), "--length", str(options.length)]
    settings += [
        "--rounds",
        str(options.rounds),
        "--threads",
        str(options.threads),
        *(["--small"] if options.small else []),
    ]
    return [
        sys.executable,
        __file__,
        "--models",
        model,
        "--ways",
        options.ways,
        *settings,
        "--child",
        step,
        way,
        str(folder),
    ]


def _child(step: str, way: str, model: str, folder: Path, options: argparse.Namespace) -> Any:
    done = subprocess.run(_command(step, way, model, folder, options), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{model}, {way}, {step}: status {done.returncode}, {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
