"""The numbers of the backward kernel for sm_90 without a GPU: Gluon is done in Python, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hopper_backward_calls import REPRESENTATIVE

pytestmark = pytest.mark.emulated

CASES = (
    "whole tiles", "tails", "tails, causal", "gradient of lse", "one query", "one key", "few queries, bottom right", "dead rows",
    "keys that nothing sees", "all rows dead", "all rows dead, other side", "narrow window", "window far behind", "heads inside",
    "capped", "72 and 128", "64, capped", "64, tails, causal", "40", "256", "256, tails", "256, causal", "256, window",
    "256, narrow window", "256, dead rows", "256, keys that nothing sees", "256, one query", "256, one key", "256, capped",
    "256, capped, full", "136", "192 and 128", "64 and 256",
    "two bands", "documents", "documents of whole tiles", "causal documents", "documents of other keys", "no order",
    "nothing is seen", "lengths", "causal with lengths", "two lengths", "bools", "bools of heads", "blocks of bools",
    "not these documents, or near", "a diagonal of each query", "seven tensors", "documents, capped", "documents, 72 and 128",
    "documents, 64", "causal documents, 64", "blocks of bools, 64", "documents, one query",
    "256, two bands", "256, documents", "256, documents of whole tiles", "256, causal documents", "200, documents of other keys",
    "256, no order", "256, nothing is seen", "256, lengths", "256, causal with lengths", "256, two lengths", "256, bools",
    "192, bools of heads", "256, blocks of bools", "136, blocks of bools, capped", "256, not these documents, or near",
    "256, a diagonal of each query", "256, seven tensors", "256, documents, capped", "136 and 256, documents",
    "256, documents, one query", "256, documents, many tiles",
)  # fmt: skip


@pytest.fixture(scope="module")
def child():
    command = [sys.executable, str(Path(__file__).with_name("hopper_backward_in_python.py"))]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    with process:
        yield process
        process.stdin.close()


def answer(child, *given):
    child.stdin.write(json.dumps(given) + "\n")
    child.stdin.flush()
    return child.stdout.readline()


@pytest.mark.parametrize("ordered", [False, True], ids=["", "deterministic"])
@pytest.mark.sweep(keep=[case for case in REPRESENTATIVE if case in CASES])
@pytest.mark.parametrize("case", CASES)
def test_numbers_are_the_references(child, case, ordered):
    assert answer(child, case, ordered) == "right\n"


LARGE = (
    "large, 128", "large, 64 and 128, some rows", "large, 256, causal", "large, 72, causal documents, some rows",
    "large, 64, lengths",
)  # fmt: skip


@pytest.mark.parametrize("ordered", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("case", LARGE)
def test_gradients_of_huge_logits(child, case, ordered):
    assert answer(child, case, ordered) == "right\n"


HIDDEN = (
    "hidden, 128", "hidden, 64", "hidden, 128, bottom right", "hidden, 96, both sides", "hidden, 256",
    "hidden, 200, both sides", "hidden, 128, documents",
    "hidden, 64, documents", "hidden, 128, lengths", "hidden, 64, bools",
    "hidden, 256, documents", "hidden, 256, causal documents, capped", "hidden, 136, lengths", "hidden, 200, bools",
)  # fmt: skip
HIDDEN_ROWS = (
    "hidden rows, 128, documents",
    "hidden rows, 64, documents",
    "hidden rows, 128, bools",
    "hidden rows, 64, bools",
    "hidden rows, 256, documents",
    "hidden rows, 200, causal documents, capped",
    "hidden rows, 256, bools",
    "a hidden query, 128",
    "a hidden query, 64",
    "a hidden query, 256",
)


@pytest.mark.parametrize("case", HIDDEN)
def test_hidden_keys_and_values_do_not_leak(child, case):
    assert answer(child, case) == "right\n"


@pytest.mark.parametrize("case", HIDDEN_ROWS)
def test_hidden_queries_and_gradients_do_not_leak(child, case):
    assert answer(child, case) == "right\n"
