"""How fast are the operators of examples/gallery, compared with the best known alternative?

Each operator and its alternative take the same arguments in turn, in one process on one thread, so that other work on the
machine matters little: the figures are medians of many rounds, and ratios are medians of the rounds' own ratios. An
alternative whose library is not installed (scipy, torchvision) is left out, and the table says so::

    python -m benchmarks.gallery --markdown tables.md             # all of them; a few minutes
    python -m benchmarks.gallery --only nms splat
    python -m benchmarks.gallery --device cuda                    # those with Triton kernels, and larger arguments
    python -m benchmarks.report --add gallery/cpu tables.md --title ... --setup ... --command ...
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from opkit.bench import timing

GALLERY = Path(__file__).parents[1] / "examples" / "gallery"
COLUMNS = ("operator", "arguments", "opkit", "alternative", "times as fast")


def names() -> list[str]:
    """Return the names of the operators, which are those of their files."""
    return sorted(path.stem for path in GALLERY.glob("*.py"))


def module(name: str) -> ModuleType:
    """Import the file of an operator."""
    if str(GALLERY) not in sys.path:
        sys.path.insert(0, str(GALLERY))
    return importlib.import_module(name)


def measure(name: str, device: str = "cpu") -> list[dict[str, Any]]:
    """Time an operator and its alternative with arguments of each size."""
    example, rows = module(name), []
    op, other, sizes = getattr(example, name), example.alternative, example.SIZES
    if device != "cpu":
        other, sizes = getattr(example, "gpu_alternative", other), example.GPU_SIZES
    for size in sizes:
        torch.manual_seed(0)
        made = example.arguments(*size)
        arguments = [each.to(device) if isinstance(each, torch.Tensor) else each for each in made]
        row: dict[str, Any] = {"operator": name, "size": size, "kernel": op.select(*arguments).kernel}
        ours, theirs = functools.partial(op, *arguments), functools.partial(other, *arguments)
        with torch.no_grad():
            ours()
            try:
                theirs()
            except ImportError as error:
                rows.append(row | {"missing": error.name})
                continue
            found = timing.compared(theirs, ours, device)
        rows.append(row | {"opkit": found.compiled, "alternative": found.eager, "ratio": found.ratio})
    return rows


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    size = " x ".join(map(str, row["size"]))
    if "missing" in row:
        return [row["operator"], size, "", f"needs {row['missing']}", ""]
    return [
        row["operator"],
        size,
        _milliseconds(row["opkit"]),
        _milliseconds(row["alternative"]),
        _ratio(row["ratio"]),
    ]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _ratio(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1)), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def alternative(example: ModuleType) -> str:
    """Return what an operator is compared with, in one line."""
    function = getattr(example.alternative, "_torchdynamo_orig_callable", example.alternative)
    return (inspect.getdoc(function) or "").partition("\n")[0]


def main() -> None:
    """Print the table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names(), default=names(), metavar="NAME")
    parser.add_argument("--markdown", type=Path, help="write the table to this file too")
    parser.add_argument(
        "--device", default="cpu", help="cuda: operators with Triton kernels alone; default: %(default)s"
    )
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    rows = []
    for name in options.only:
        if options.device != "cpu" and not hasattr(module(name), "GPU_SIZES"):
            continue
        rows += measure(name, options.device)
        print(*cells(rows[-1]), file=sys.stderr)
    print(table(rows))
    if options.markdown:
        options.markdown.write_text(table(rows) + "\n", encoding="utf-8")
    print(json.dumps({"benchmark": "gallery", "torch": torch.__version__, "results": rows}))


if __name__ == "__main__":
    main()
