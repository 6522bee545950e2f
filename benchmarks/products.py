"""How fast are products and convolutions with packed weights? opkit, oneDNN and ONNX Runtime (CPUs).

The products are BERT-base's and GPT-2's with 128 rows and with one, and the convolutions ResNet-50's of one image of 224 x 224.
oneDNN has weights in its own layouts; "direct" is opkit without Winograd's method. The ways take turns; a way's time is the
median of the medians of its turns. The bound is the rate of a product whose operands stay in the caches, which is measured first.
ONNX Runtime (``onnx`` and ``onnxruntime``) is left out where it is not installed, and in convolutions, since it converts the
layouts of single ones.

    python benchmarks/products.py [--threads 2] [--isa avx2] [--products] [--convolutions]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from opkit import _core
from opkit.ship.products import pack_convolution, pack_linear, winograd_tile

Run = Callable[[], Any]
mkldnn = torch.ops.mkldnn

PRODUCTS = {  # rows, columns, depth; how often a model computes it
    "BERT attention": (128, 768, 768, 48),
    "BERT up": (128, 3072, 768, 12),
    "BERT down": (128, 768, 3072, 12),
    "GPT-2 qkv": (128, 2304, 768, 12),
    "GPT-2 logits": (128, 50257, 768, 1),
    "decode attention": (1, 768, 768, 48),
    "decode up": (1, 3072, 768, 12),
    "decode down": (1, 768, 3072, 12),
    "decode logits": (1, 50257, 768, 1),
}
CONVOLUTIONS = {  # in, out, size of the image, kernel, stride; how often
    (3, 64, 224, 7, 2): 1,
    (64, 64, 56, 1, 1): 1,
    (64, 64, 56, 3, 1): 3,
    (64, 256, 56, 1, 1): 4,
    (256, 64, 56, 1, 1): 2,
    (256, 128, 56, 1, 1): 1,
    (128, 128, 56, 3, 2): 1,
    (128, 512, 28, 1, 1): 4,
    (256, 512, 56, 1, 2): 1,
    (512, 128, 28, 1, 1): 3,
    (128, 128, 28, 3, 1): 3,
    (512, 256, 28, 1, 1): 1,
    (256, 256, 28, 3, 2): 1,
    (256, 1024, 14, 1, 1): 6,
    (512, 1024, 28, 1, 2): 1,
    (1024, 256, 14, 1, 1): 5,
    (256, 256, 14, 3, 1): 5,
    (1024, 512, 14, 1, 1): 1,
    (512, 512, 14, 3, 2): 1,
    (512, 2048, 7, 1, 1): 3,
    (1024, 2048, 14, 1, 2): 1,
    (2048, 512, 7, 1, 1): 2,
    (512, 512, 7, 3, 1): 2,
}


def product_ways(rows: int, columns: int, depth: int, threads: int) -> dict[str, Run]:
    """Return the ways to compute a product with a bias."""
    x, w, bias = torch.randn(rows, depth), torch.randn(columns, depth) * 0.1, torch.randn(columns)
    packed = pack_linear(w)
    reordered = mkldnn._reorder_linear_weight(w, rows)

    ways: dict[str, Run] = {
        "opkit": lambda: torch.ops.opkit.packed_linear(x, packed, columns, bias, "none"),
        "oneDNN": lambda: mkldnn._linear_pointwise(x, reordered, bias, "none", [], ""),
        "torch": lambda: torch.nn.functional.linear(x, w, bias),
    }
    with contextlib.suppress(ImportError):
        ways["ONNX Runtime"] = _onnx_runtime(x, w, bias, threads)
    return _verified(ways, x.double() @ w.double().T + bias)


def convolution_ways(case: tuple[int, ...], threads: int) -> dict[str, Run]:
    """Return the ways to compute a convolution with a bias and ReLU, of images with the channels next to each other."""
    inner, outer, size, kernel, stride = case
    padding = kernel // 2
    x = torch.randn(1, inner, size, size).contiguous(memory_format=torch.channels_last)
    w, bias = torch.randn(outer, inner, kernel, kernel) * 0.1, torch.randn(outer)
    tile = winograd_tile(w, (stride, stride), (1, 1), 1, [(size - 1) // stride + 1] * 2)
    packed = {each: pack_convolution(w, 1, each) for each in (tile, 0)}
    settings: Any = ([padding] * 2, [stride] * 2, [1, 1], 1)
    reordered = mkldnn._reorder_convolution_weight(w, *settings, [*x.shape])
    pairs: Any = ((kernel, kernel), (stride, stride), (padding, padding), (1, 1))

    ways: dict[str, Run] = {
        "opkit": lambda: torch.ops.opkit.packed_convolution(
            x, packed[tile], bias, None, *pairs, 1, outer, tile, "relu"
        ),
        "direct": lambda: torch.ops.opkit.packed_convolution(x, packed[0], bias, None, *pairs, 1, outer, 0, "relu"),
        "oneDNN": lambda: mkldnn._convolution_pointwise(x, reordered, bias, *settings, "relu", [], ""),
    }
    wanted = torch.nn.functional.conv2d(x.double(), w.double(), bias.double(), stride, padding).relu()
    return _verified(ways, wanted)


def _onnx_runtime(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, threads: int) -> Run:
    onnx, runtime = importlib.import_module("onnx"), importlib.import_module("onnxruntime")
    helper, tensor = onnx.helper, onnx.numpy_helper.from_array
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Add", ["m", "b"], ["y"])]
    shapes = {"x": [*x.shape], "y": [x.shape[0], w.shape[0]]}
    values = {name: helper.make_tensor_value_info(name, 1, shape) for name, shape in shapes.items()}
    weights = [tensor(w.T.contiguous().numpy(), "w"), tensor(bias.numpy(), "b")]
    graph = helper.make_graph(nodes, "product", [values["x"]], [values["y"]], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed = {"x": x.numpy()}
    return lambda: torch.from_numpy(session.run(None, feed)[0])


def _verified(ways: dict[str, Run], wanted: torch.Tensor) -> dict[str, Run]:
    for name, run in ways.items():
        error = (run().double() - wanted).abs().max() / wanted.abs().max()
        assert error < 1e-5, f"{name} is wrong by {error:.1e}"
    return ways


def medians(ways: Mapping[str, Run], turns: int, seconds: float = 0.03) -> dict[str, float]:
    """Return the seconds of each way."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, run in ways.items():
            time.sleep(0.01)  # threads of the way before go to sleep
            run()
            times: list[float] = []
            begin = time.perf_counter()
            while (start := time.perf_counter()) < begin + seconds or len(times) < 5:
                run()
                times.append(time.perf_counter() - start)
            found[name].append(statistics.median(times))
    return {name: statistics.median(times) for name, times in found.items()}


def bound(threads: int) -> float:
    """Return multiply-adds in a second, of threads whose operands stay in the caches."""
    x, packed, y = torch.ones(48, 256), torch.ones(256 * 64), torch.empty(48, 64)
    addresses = (x.data_ptr(), 256, packed.data_ptr(), 0, y.data_ptr())

    def run() -> None:
        for _ in range(50):
            _core.linear(*addresses, 48, 64, 256, "none")

    torch.set_num_threads(1)
    seconds = min(medians({"": run}, 1)[""] for _ in range(5)) / 50
    torch.set_num_threads(threads)
    return threads * 48 * 64 * 256 / seconds


def table(
    title: str, cases: Mapping[Any, Any], make: Callable[[Any], Any], work: Callable[[Any], int], turns: int
) -> Any:
    """Print a table of cases, and the sum weighted by how often they occur; return the rows."""
    rows: list[dict[str, Any]] = []
    total: dict[str, float] = {}
    for case, count in cases.items():
        seconds = medians(make(case), turns)
        for name, each in seconds.items():
            total[name] = total.get(name, 0) + each * count
        rows.append({"case": str(case), "count": count, **{name: each * 1e6 for name, each in seconds.items()}})
        rates = "  ".join(
            f"{name} {each * 1e6:9.1f} us {2e-9 * work(case) / each:6.1f} GFLOP/s ({seconds['opkit'] / each:.2f})"
            for name, each in seconds.items()
        )
        print(f"{case!s:24} x{count:<3} {rates}", flush=True)
    sums = "  ".join(f"{name} {each * 1e3:.3f} ms ({total['opkit'] / each:.3f})" for name, each in total.items())
    print(f"{title}, summed: {sums}\n", flush=True)
    return rows


def main() -> None:
    """Print the tables, and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--isa", default="", help="the widest instruction set that opkit uses")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--products", action="store_true", help="only these")
    parser.add_argument("--convolutions", action="store_true", help="only these")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.isa:
        os.environ["OPKIT_ISA"] = options.isa
    both = options.products == options.convolutions
    print(
        f"{options.threads} threads, {_core.isa_table()['product_f32']}; in brackets: opkit's time divided by this one"
    )
    found: dict[str, Any] = {"threads": options.threads, "isa": options.isa}
    if both or options.products:
        counts = {name: sizes[3] for name, sizes in PRODUCTS.items()}
        for title, rows in (("128 rows", 128), ("one row", 1)):
            chosen = {name: count for name, count in counts.items() if PRODUCTS[name][0] == rows}
            found[title] = table(
                title,
                chosen,
                lambda name: product_ways(*PRODUCTS[name][:3], options.threads),
                lambda name: PRODUCTS[name][0] * PRODUCTS[name][1] * PRODUCTS[name][2],
                options.turns,
            )
    if both or options.convolutions:
        found["convolutions"] = table(
            "ResNet-50",
            CONVOLUTIONS,
            lambda case: convolution_ways(case, options.threads),
            lambda case: case[0] * case[1] * ((case[2] - 1) // case[4] + 1) ** 2 * case[3] ** 2,
            options.turns,
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
