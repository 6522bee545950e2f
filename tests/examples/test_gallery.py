"""examples/gallery: results against loops in Python, every file's main(), the contract, and the generated pages.

The default run has three operators of each test; ``--exhaustive`` has all.
"""

import copy
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import gallery_oracles
import pytest
import torch

import opkit
from opkit.testing import compile_for, interpret

pytest.importorskip("triton")

FOLDER = Path(__file__).parents[2] / "examples" / "gallery"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
SAMPLE = ["linear_scan", "run_length", "segment_softmax"]
if str(FOLDER) not in sys.path:
    sys.path.insert(0, str(FOLDER))


def ints(*rows: Any) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def blobs(text: str) -> torch.Tensor:
    return torch.tensor([[c == "#" for c in row] for row in text.split()])


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


IMAGES = [blobs("#"), blobs("."), blobs("##.#. #...# ###.# ....#"), blobs("#.#.# .#.#. #.#.#"), torch.ones(0, 3).bool()]
SQUARES = torch.tensor([[0.0, 0, 2, 2], [1, 1, 3, 3], [0, 0, 2, 2], [5, 5, 6, 6], [0, 0, 2, 1], [4, 4, 4, 4]]).double()
CUBE = torch.tensor([[x, y, z] for x in (0.0, 1) for y in (0.0, 1) for z in (0.0, 1)]).double()
LOGS = normal(2, 3, 4, 3).log_softmax(-1)

CASES: dict[str, list[tuple[Any, ...]]] = {
    "hadamard": [(1, 1), (3, 2), (2, 16), (1, 32), (0, 8)],
    "linear_scan": [(2, 5, 3), (1, 1, 300), (1, 0, 2), (0, 2, 2)],
    "edit_distance": [
        (ints([1, 2, 3, 1], [1, 1, 1, 1]), ints([2, 3, 1, 4, 4], [2, 1, 2, 1, 2]), ints(4, 9), ints(5, 3)[:2]),
        (ints([1, 2]), ints([]), ints(2), ints(0)),
        (ints([1, 2], [1, 2]), ints([1, 2], [2, 1]), ints(0, 2), ints(-1, 2)),
    ],
    "connected_components": [(image, diagonal) for image in IMAGES for diagonal in (False, True)],
    "nms": [(SQUARES, torch.tensor([0.5, 0.9, 0.5, 0.1, 0.7, 0.2]).double(), t) for t in (0.0, 0.15, 0.5, 0.99)]
    + [(SQUARES[:0], torch.zeros(0).double(), 0.5)],
    "ball_query": [(CUBE[:3], CUBE, r, k) for r, k in ((0.5, 2), (1.0, 3), (1.2, 9))] + [(CUBE, CUBE[:0], 1.0, 2)],
    "chamfer_distance": [(CUBE, CUBE[3:4]), (CUBE, CUBE), (normal(70, 2), normal(300, 2))],
    "farthest_points": [(CUBE, 1), (CUBE, 8), (CUBE[:1], 3), (CUBE, 0), (normal(35, 3), 12)],
    "rnnt_loss": [(LOGS[0], LOGS[1], frames, tokens) for frames, tokens in ((ints(4, 3, 2), ints(2, 1, 0)),)],
    "segment_softmax": [(7, 3, 4), (0, 2, 3), (5, 0, 2)],
    "top_p_sample": [
        (torch.tensor([[1.0, 3, 3, 2, -9]]).double().expand(9, 5), torch.linspace(0, 0.999, 9).double(), p, k)
        for p, k in ((0.9, 5), (0.3, 5), (1.0, 3), (0.6, 1))
    ],
    "deformable_attention": [(1, 4, 5, 3)],
    "selective_scan": [(2, 6, 3), (1, 1, 17), (1, 0, 2)],
    "splat": [(normal(2, 9, 2), normal(2, 9, 3), h, w) for h, w in ((1, 1), (2, 3))],
    "moe_permute": [(9, 2, 3), (4, 1, 5), (0, 2, 2)],
    "run_length": [(ints(*row),) for row in ([1, 1, 2, 2, 2, 1], [5], [], [0, 0, 0])],
    "fft_convolution": [(normal(2, 9), normal(2, k)) for k in (1, 4, 12)],
    "grouped_product": [
        (3, 13, 4, 130),
        (2, 0, 3, 2),
        (normal(5, 2), normal(3, 2, 3), ints(1, 4, 2, 9)),
        (normal(3, 2), normal(0, 2, 3), ints(0)),
    ],
    "int4_linear": [(1, 256, 3), (3, 256, 2)],
    "int8_linear": [(1, 300, 3), (5, 3, 2), (2, 0, 2)],
    "sparsemax": [(3, 7), (1, 1), (2, 300), (0, 4)],
    "soft_dtw": [(normal(2, n, m), g) for n, m, g in ((1, 1, 1.0), (3, 4, 0.5), (4, 2, 2.0))],
    "causal_convolution": [(2, 5, 3), (1, 1, 130), (1, 0, 2)],
    "forced_alignment": [(normal(2, 4, 4), ints([1, 1], [2, 3])), (normal(1, 3, 3), ints([]))],
    "color_lookup": [(3, 2, 3), (1, 1, 2), (1, 4, 1)],
    "sparse_convolution": [(5, 3, 2), (1, 5, 4)],
    "distance_transform": [(image,) for image in IMAGES],
    "adamw_step": [(1,), (37,), (0,)],
    "embedding_bag": [
        (7, 150, 3, 4),
        (2, 3, 0, 2),
        (normal(4, 17), ints([0, -1, 3], [-1, -1, -1]), normal(2, 3), True),
        (normal(0, 2), ints([-1, -1]), normal(1, 2), True),
    ],
}


def arguments(name: str, case: tuple[Any, ...]) -> tuple[Any, ...]:
    """A case's arguments in float64; plain numbers are the size for the file's own ``arguments``."""
    made = (
        case if any(isinstance(each, torch.Tensor) for each in case) else importlib.import_module(name).arguments(*case)
    )
    return tuple(
        each.double() if isinstance(each, torch.Tensor) and each.is_floating_point() else each for each in made
    )


def results(function: Any, inputs: Sequence[Any]) -> Any:
    """What a function returns or, if it returns nothing, its tensors after it has written to them."""
    copies = copy.deepcopy(inputs)
    returned = function(*copies)
    return [each for each in copies if isinstance(each, torch.Tensor)] if returned is None else returned


def operators(name: str) -> dict[str, Any]:
    """The operators that a file declares checks for, by name."""
    module = importlib.import_module(name)
    named = {op.describe().name: op for op in vars(module).values() if hasattr(op, "describe")}
    return {each: named[each] for each in module.OPKIT_CHECKS}


def test_every_file_has_cases_and_an_oracle():
    assert sorted(CASES) == NAMES
    assert all(hasattr(gallery_oracles, name) for name in NAMES)


@pytest.mark.sweep(keep=SAMPLE)
@pytest.mark.parametrize("name", NAMES)
def test_results_are_those_of_loops(name):
    op = getattr(importlib.import_module(name), name)
    for case in CASES[name]:
        torch.manual_seed(1)
        inputs = arguments(name, case)
        expected = results(getattr(gallery_oracles, name), inputs)
        torch.testing.assert_close(results(op, inputs), expected)
        torch.testing.assert_close(results(op.reference, inputs), expected)


def test_deformable_attention_refuses_a_map_without_pixels_as_grid_sample_does():
    module = importlib.import_module("deformable_attention")
    inputs = module.arguments(2, 0, 5, 3)
    with pytest.raises(ValueError, match=r"value of shape \(2, 0, 5, 8, 32\) is a map without pixels"):
        module.deformable_attention(*inputs)
    with pytest.raises(RuntimeError, match="non-empty spatial dimensions"):
        module.alternative(*inputs)


@pytest.mark.sweep(keep=SAMPLE)
@pytest.mark.parametrize("name", NAMES)
def test_the_example_runs(name):
    torch.manual_seed(0)
    importlib.import_module(name).main()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_the_alternative_computes_the_same(name):
    module = importlib.import_module(name)
    torch.manual_seed(0)
    inputs = module.arguments(*module.SIZES[-1])
    result = results(getattr(module, name), inputs)
    try:
        other = results(module.alternative, inputs)
    except ImportError as error:
        pytest.skip(f"needs {error.name}")
    if name == "connected_components":  # other numbers for the same components
        other, result = (
            torch.stack([each.unique(return_inverse=True)[1] for each in both]) for both in (other, result)
        )
    if name == "run_length":
        result = [(result[0][i, :n], result[1][i, :n]) for i, n in enumerate(result[2].tolist())]
    torch.testing.assert_close(result, other, rtol=1e-3, atol=1e-3)


@pytest.mark.sweep(keep=SAMPLE)
@pytest.mark.parametrize("name", NAMES)
def test_numbers_and_memory(name):
    checks = importlib.import_module(name).OPKIT_CHECKS
    for each, op in operators(name).items():
        report = opkit.check(
            op, max_examples=6, properties=["numbers", "memory.guard", "fake"], database=False, **checks[each]
        )
        report.raise_for_failures()


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_the_contract_holds(name):
    checks = importlib.import_module(name).OPKIT_CHECKS
    for each, op in operators(name).items():
        opkit.check(op, max_examples=8, database=False, **checks[each]).raise_for_failures()


# The files with kernels in Triton, and sizes for which tiles do not fit.
TRITON: dict[str, tuple[int, ...]] = {
    "adamw_step": (1030,),
    "ball_query": (9, 1100),
    "causal_convolution": (2, 19, 130),
    "chamfer_distance": (2, 70),
    "color_lookup": (9, 31, 3),
    "deformable_attention": (2, 5, 6, 7),
    "edit_distance": (5, 9),
    "embedding_bag": (9, 70, 5, 11),
    "farthest_points": (2, 70, 9),
    "hadamard": (9, 128),
    "int4_linear": (3, 1280, 5),
    "linear_scan": (2, 5, 130),
    "selective_scan": (2, 6, 33),
    "soft_dtw": (2, 9, 7),
    "sparsemax": (3, 300),
}
LAUNCHED = {"chamfer_distance": "nearest_point"}  # the operator that has the kernel, and takes the same arguments


ROUNDED = ("ball_query", "farthest_points")  # results are indices, which depend on rounding: it is that of float32


def launched(name: str) -> Any:
    return getattr(importlib.import_module(name), LAUNCHED.get(name, name))


def converted(inputs: tuple[Any, ...], dtype: torch.dtype, device: str = "cpu") -> tuple[Any, ...]:
    """Arguments on a device, with tensors of floats in a dtype."""
    moved = (each.to(device) if isinstance(each, torch.Tensor) else each for each in inputs)
    return tuple(
        each.to(dtype) if isinstance(each, torch.Tensor) and each.is_floating_point() else each for each in moved
    )


@pytest.mark.emulated
@pytest.mark.parametrize("name", TRITON)
def test_triton_kernels_in_the_interpreter(name):
    op, run = launched(name), interpret(launched(name))
    wide = torch.float32 if name in ROUNDED else torch.float64
    torch.manual_seed(0)
    for case in (*CASES[name], TRITON[name]):
        inputs = converted(arguments(name, case), torch.float32)
        result, expected = results(run, inputs), results(op.reference, converted(inputs, wide))
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5, check_dtype=False)
    apart = [each.repeat_interleave(2, -1)[..., ::2] if isinstance(each, torch.Tensor) else each for each in inputs]
    torch.testing.assert_close(results(run, apart), result)
    low = converted(inputs, torch.bfloat16)
    expected = results(op.reference, converted(low, wide))
    torch.testing.assert_close(results(run, low), expected, rtol=2e-2, atol=2e-2, check_dtype=False)


@pytest.mark.sweep(keep=["linear_scan"])
@pytest.mark.parametrize("name", TRITON)
def test_triton_kernels_compile_without_spills(name):
    report = compile_for(launched(name), ["sm_80", "sm_90", "gfx942"])
    report.raise_for_failures()
    assert all(row.spills == 0 for row in report.rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", TRITON)
def test_triton_kernels_on_a_gpu(name, dtype):
    module, op = importlib.import_module(name), getattr(importlib.import_module(name), name)
    wide = torch.float32 if name in ROUNDED else torch.float64
    rtol, atol = (1e-4, 1e-3) if dtype == torch.float32 else (2e-2, 2e-2)
    torch.manual_seed(0)
    for case in (*CASES[name], TRITON[name], module.SIZES[-1]):
        inputs = converted(arguments(name, case), dtype)
        on_gpu = converted(inputs, dtype, "cuda")
        expected, result = results(op.reference, converted(inputs, wide)), results(op, on_gpu)
        torch.testing.assert_close(result, expected, rtol=rtol, atol=atol, check_dtype=False, check_device=False)
    assert launched(name).select(*on_gpu).kernel != "reference"


def test_pages(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER.parents[1]))
    pages = importlib.import_module("benchmarks.gallery_pages")
    index, *written = pages.write(tmp_path / "pages")
    assert {path.stem for path in written} == set(NAMES)
    assert all(f"[{name}]({name}.md)" in index.read_text(encoding="utf-8") for name in NAMES)
    for name in NAMES:
        text = (tmp_path / "pages" / f"{name}.md").read_text(encoding="utf-8")
        source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
        assert source in text
        assert "Passport of gallery::" in text
        assert f"{name}.svg" not in text or (tmp_path / "pages" / f"{name}.svg").exists()


def test_a_chart_has_a_bar_for_each_time(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER.parents[1]))
    pages = importlib.import_module("benchmarks.gallery_pages")
    svg = pages.chart([["nms", "10 <", "0.5 ms", "2 ms", "4"], ["nms", "20", "", "needs torchvision", ""]])
    bars = ElementTree.fromstring(svg).findall("{http://www.w3.org/2000/svg}rect")
    assert [float(bar.attrib["width"]) for bar in bars[1:]] == [75.0, 300.0]
