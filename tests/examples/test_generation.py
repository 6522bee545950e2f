"""examples/generation.py: requests that share pages draw what full attention draws, whatever is batched with them."""

import random

import generation
import paged_requests
import pytest
import torch
from paged_requests import Pages, Request, Scheduler


@pytest.mark.parametrize(
    ("device", "variants"),
    [
        ("cpu", ["pages, eager", "pages, opkit"]),
        pytest.param("cpu", ["pages of int8, opkit", "pages, opkit"], marks=pytest.mark.exhaustive),
        pytest.param("cuda", ["pages, opkit", "pages of int8, opkit", "pages of float8, opkit"], marks=pytest.mark.gpu),
    ],
)
def test_generation(device, variants, monkeypatch, capsys):
    monkeypatch.setattr(generation, "transformers_model", lambda *_: None)
    torch._dynamo.reset()
    known = ["pages, eager", "pages, opkit", "pages of int8, opkit", "pages of float8, opkit"]
    numbers = ",".join(str(known.index(name)) for name in variants)
    rows = generation.main([f"--variants={numbers}", f"--device={device}", "--threads=1"])
    assert [row.name for row in rows] == variants
    assert "pages, opkit: the first 100% of an answer" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_against_transformers(capsys):
    pytest.importorskip("transformers", reason="transformers is not installed")
    torch._dynamo.reset()
    generation.main(["--variants=0,2,3,5", "--threads=1"])
    assert capsys.readouterr().out.count("the first 100% of an answer") == 4


class Model:
    """Draws the sum of all tokens before, from what a paged cache holds: wrong pages give other tokens."""

    def __init__(self, pages: Pages) -> None:
        self.memory = {}
        self.size = pages.size

    def __call__(self, batch: paged_requests.Batch) -> list[int]:
        rows = len(batch.requests) + 1
        packed = batch.packed(rows, 16)
        tokens, positions, starts, before, table = paged_requests.unpacked(packed, len(batch.tokens) + 1, rows)
        drawn = []
        for row in range(rows - 1):
            pages, first, last = table[row].tolist(), int(starts[row]), int(starts[row + 1])
            for token, position in zip(tokens[first:last].tolist(), positions[first:last].tolist(), strict=True):
                self.memory[pages[position // self.size], position % self.size] = token
            length = int(before[row]) + last - first
            drawn.append(sum(self.memory[pages[n // self.size], n % self.size] * (n + 1) for n in range(length)) % 97)
        return drawn


def expected(request: Request) -> list[int]:
    tokens = request.tokens[: request.prompt]
    for _ in range(request.wanted):
        tokens.append(sum(token * (n + 1) for n, token in enumerate(tokens)) % 97)
    return tokens[request.prompt :]


@pytest.mark.parametrize("count", [9, 14, 60])  # pages: requests lose theirs to others where there are few
def test_the_scheduler(count):
    draw = random.Random(count)
    pages = Pages(count, 4)
    scheduler, model = Scheduler(pages, most_requests=5, most_tokens=9), Model(pages)
    beginnings = [[draw.randrange(97) for _ in range(12)] for _ in range(3)]
    requests = []
    for _ in range(60):
        beginning = draw.choice(beginnings)[: draw.randrange(13)]
        requests.append(
            Request(beginning + [draw.randrange(97) for _ in range(draw.randrange(1, 8))], draw.randrange(1, 9))
        )
    waiting, ended = [*requests], []
    while len(ended) < len(requests):
        for request in waiting[:3]:
            scheduler.add(request)
        del waiting[:3]
        batch = scheduler.step()
        assert len(batch.tokens) <= 9
        assert len(batch.requests) <= 5
        ended += scheduler.update(batch, model(batch))
    assert scheduler.step() is None
    for request in requests:
        assert request.generated == expected(request)
    assert not pages.users
    assert sum(request.found for request in requests) > 0
    assert (scheduler.preemptions > 0) == (count < 20)


def test_a_request_that_never_fits():
    scheduler = Scheduler(Pages(4, 4), most_requests=2, most_tokens=8)
    scheduler.add(Request([1] * 8, 4))
    with pytest.raises(ValueError, match="needs 4 of 3 pages"):
        scheduler.add(Request([1] * 8, 5))
    with pytest.raises(ValueError, match="has no prompt"):
        scheduler.add(Request([], 5))
