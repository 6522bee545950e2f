"""The benchmarks of attention on GPUs run: in Triton's interpreter, with small sizes, whose times say nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.build
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def run(name, *options, interpret="1"):
    """The process of a benchmark that sees no GPU."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--rounds", "1", *options]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": interpret}
    return subprocess.run(command, env=variables, capture_output=True, text=True)


def printed(*given, **named):
    """What it prints at last."""
    done = run(*given, **named)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def table(name, what, *options):
    """The rows of a table."""
    return printed(name, "--quick", "--what", what, *options)["tables"][what]


def test_live_tiles_are_counted():
    """Of 256 queries by 256 keys, tiles of 128 by 128: packed sequences of 32 lie in those of the diagonal, two of four."""
    only = "--only", "causal packed sequences of 32"
    rows = table("attention_gpu_lists", "shares", *only)
    assert [(each["case"], each["tiles"]) for each in rows] == [
        ("causal packed sequences of 32, forward", "50.0%"),
        ("causal packed sequences of 32, backward", "50.0%"),
    ]


def test_lists_are_built_for_both_directions_and_order_is_counted():
    rows = table("attention_gpu_lists", "lists", "--only", "unequal causal")
    assert [each["case"] for each in rows] == ["unequal causal packed sequences"]
    assert {"forward, us", "backward, us", "its other way, us", "order, us", "visits, us", "found, host us"} <= set(
        rows[0]
    )


@pytest.mark.parametrize(("name", "what"), [("attention_gpu_float8", "float8"), ("attention_gpu", "host")])
def test_opkit_is_called_in_each_row(name, what):
    for row in table(name, what):
        times = [value for column, value in row.items() if column.startswith("opkit")]
        assert times
        assert min(times) > 0


def test_deterministic_backwards_give_the_same_bits():
    (row,) = table("attention_gpu_deterministic", "backward")
    assert {"opkit deterministic", "opkit deterministic, unfilled"} <= set(row["the same bits"].split("; "))


def test_decoding_of_dense_and_of_paged_keys():
    results = printed("attention_gpu_decode", "--quick", "--only", "A,P")["results"]
    assert [each["paged"] for each in results] == [False, True]
    assert all(min(each["opkit_us"], each["split_us"]) > 0 for each in results)


def test_without_a_gpu_nothing_is_measured():
    for options, interpret in (([], "1"), (["--quick"], "0")):
        done = run("attention_gpu_float8", *options, interpret=interpret)
        assert done.returncode == 1
        assert "torch finds none" in done.stderr
