"""Pages of a KV cache that requests share, and a scheduler that batches requests as they come and go.

The cache is divided into pages of a few tokens. A request takes a page when it has filled the last one, and gives its pages back
when it ends; pages that begin with the same tokens are computed once, as in PagedAttention (Kwon et al., 2023). At each step all
running requests have a token, and the prompts of new ones fill what is left of the batch, in chunks, as in Sarathi (Agrawal et
al., 2023). Nothing here computes: ``generation.py`` runs a model on these batches.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

SCRATCH = 0  #: the page that rows without a request write to; no request has it


class Pages:
    """Pages by number: free ones, those in use, and those that hold a known beginning of a prompt.

    A page with a known content whose last user is gone stays until its memory is needed, the least recently used first.

    >>> pages = Pages(count=4, size=2)
    >>> mine = [pages.take(), pages.take()]
    >>> pages.publish([7, 8, 9, 10], mine)
    >>> pages.shared([7, 8, 9, 10, 11]) == mine, pages.shared([7, 8, 1, 2, 3]) == mine[:1]
    (True, True)
    """

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self.free = [*range(count - 1, SCRATCH, -1)]
        self.users = collections.Counter[int]()
        self.most_used = 0  # pages at once
        self._names: dict[tuple[int, ...], int] = {}  # the page that a page follows and its tokens, and the page
        self._name_of: dict[int, tuple[int, ...]] = {}
        self._unused: dict[int, None] = {}  # known pages without users, the least recently used first

    def take(self) -> int | None:
        """Return a page that nobody uses, or None."""
        if self.free:
            page = self.free.pop()
        elif self._unused:
            page = next(iter(self._unused))
            del self._unused[page], self._names[self._name_of.pop(page)]
        else:
            return None
        self._use(page)
        return page

    def shared(self, tokens: Sequence[int]) -> list[int]:
        """Use the pages that hold the beginning of a prompt, and return them; the last token is always left to compute."""
        found: list[int] = []
        for name in self._beginnings(tokens[:-1], found):
            page = self._names.get(name)
            if page is None:
                break
            self._unused.pop(page, None)
            self._use(page)
            found.append(page)
        return found

    def publish(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Let others share the full pages of a prompt, whose keys and values are computed."""
        known: list[int] = []
        for name, page in zip(self._beginnings(tokens, known), pages, strict=False):
            if page not in self._name_of:
                if name in self._names:  # computed at the same time by another request
                    return
                self._names[name], self._name_of[page] = page, name
            known.append(page)

    def give_back(self, pages: Sequence[int]) -> None:
        """End the use of pages; those at the end of a prompt are forgotten first."""
        for page in reversed(pages):
            self.users[page] -= 1
            if self.users[page] == 0:
                del self.users[page]
                if page in self._name_of:
                    self._unused[page] = None
                else:
                    self.free.append(page)

    def _use(self, page: int) -> None:
        self.users[page] += 1
        self.most_used = max(self.most_used, len(self.users))

    def _beginnings(self, tokens: Sequence[int], pages: list[int]) -> Iterator[tuple[int, ...]]:
        """Yield the names of a prompt's full pages; ``pages`` are those of the names before."""
        for start in range(0, len(tokens) - self.size + 1, self.size):
            yield (pages[-1] if pages else SCRATCH, *tokens[start : start + self.size])


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt, and how many tokens are wanted after it.

    Attributes:
        tokens: the prompt, and the generated tokens.
        prompt: the number of tokens of the prompt.
        wanted: the number of tokens after it.
        pages: the pages of its keys and values.
        computed: the number of tokens whose keys and values are in pages.
        found: the number of tokens whose keys and values were there when it began.
    """

    tokens: list[int]
    wanted: int
    prompt: int = 0
    pages: list[int] = dataclasses.field(default_factory=list[int])
    computed: int = 0
    found: int = 0

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt :]


@dataclasses.dataclass(frozen=True)
class Batch:
    """One step: some tokens of each of several sequences.

    Attributes:
        requests, counts: the requests, and how many tokens of each are computed.
        tokens, positions: of all of them, one request after another.
        starts: where each request's tokens begin, and the total.
        before: how many keys each has before the step.
        table: the pages of each.
    """

    requests: list[Request]
    counts: list[int]
    tokens: list[int]
    positions: list[int]
    starts: list[int]
    before: list[int]
    table: list[list[int]]

    @property
    def is_decoding(self) -> bool:
        """Whether each request has one token."""
        return max(self.counts) == 1

    def packed(self, rows: int, width: int) -> Tensor:
        """Return all of it as one tensor of int32, for one copy to a GPU.

        Args:
            rows: those without a request write one token to the page ``SCRATCH``.
            width: of the page table.
        """
        more, total = rows - len(self.requests), self.starts[-1]
        starts = [*self.starts, *range(total + 1, total + more + 1)]
        nothing = [0] * more
        table = [[*pages, *[SCRATCH] * (width - len(pages))] for pages in [*self.table, *[[]] * more]]
        parts = (self.tokens, nothing, self.positions, nothing, starts, self.before, nothing, *table)
        return torch.tensor([*itertools.chain(*parts)], dtype=torch.int32)


def unpacked(packed: Tensor, total: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, positions, starts, lengths before the step, and the page table."""
    tokens, positions, starts, before, table = packed.split(
        [total, total, rows + 1, rows, packed.shape[0] - 2 * total - 2 * rows - 1]
    )
    return tokens, positions, starts, before, table.view(rows, -1)


class Scheduler:
    """Which tokens of which requests are computed at each step.

    Args:
        pages: the pages of the cache.
        most_requests: how many run at once.
        most_tokens: how many tokens a step computes; at least ``most_requests``.
    """

    def __init__(self, pages: Pages, most_requests: int, most_tokens: int) -> None:
        self.pages, self.most_requests, self.most_tokens = pages, most_requests, most_tokens
        self.waiting = collections.deque[Request]()
        self.running: list[Request] = []
        self.preemptions = 0  # how often a request lost its pages to older ones

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: it has no prompt, or needs more pages than there are.
        """
        needed = -(-(request.prompt + request.wanted) // self.pages.size)
        if not request.tokens or needed >= self.pages.count:
            size = f"{request.prompt} + {request.wanted} tokens"
            raise ValueError(f"a request of {size} has no prompt, or needs {needed} of {self.pages.count - 1} pages")
        self.waiting.append(request)

    def step(self) -> Batch | None:
        """Return the next batch, or None when all requests have ended."""
        left, preemptions = self.most_tokens, self.preemptions
        counts: dict[Request, int] = {}
        for request in [*self.running]:  # the oldest first, which never lose their pages to younger ones
            if request in self.running and left > 0:
                left -= self._planned(request, left, counts)
        while self.waiting and left > 0 and len(self.running) < self.most_requests and self.preemptions == preemptions:
            request = self.waiting[0]
            request.pages = self.pages.shared(request.tokens)
            request.computed = found = len(request.pages) * self.pages.size
            if not self._has_room(request, min(left, len(request.tokens) - found)):
                self._preempt(request)
                break
            request.found = found
            self.running.append(self.waiting.popleft())
            left -= self._planned(request, left, counts)
        return _batch(counts) if counts else None

    def _planned(self, request: Request, left: int, counts: dict[Request, int]) -> int:
        """Add a request's next tokens to the batch, at the cost of the youngest requests if there are no pages."""
        count = min(left, len(request.tokens) - request.computed)
        while not self._has_room(request, count):
            youngest = self.running.pop()
            counts.pop(youngest, None)
            self._preempt(youngest)
            self.waiting.appendleft(youngest)
            self.preemptions += 1
            if youngest is request:
                return 0
        counts[request] = count
        return count

    def _has_room(self, request: Request, count: int) -> bool:
        """Take the pages for a request's next tokens, and return whether there are enough."""
        while len(request.pages) * self.pages.size < request.computed + count:
            page = self.pages.take()
            if page is None:
                return False
            request.pages.append(page)
        return True

    def _preempt(self, request: Request) -> None:
        self.pages.give_back(request.pages)
        request.pages, request.computed = [], 0

    def update(self, batch: Batch, tokens: Sequence[int]) -> list[Request]:
        """Append the tokens that a batch gave for requests whose tokens are all computed; return those that have ended."""
        ended: list[Request] = []
        for request, count, token in zip(batch.requests, batch.counts, tokens, strict=False):
            request.computed += count
            if request.computed < len(request.tokens):  # a part of the prompt
                continue
            if len(request.tokens) == request.prompt:
                self.pages.publish(request.tokens, request.pages)
            request.tokens.append(token)
            if len(request.generated) == request.wanted:
                self.running.remove(request)
                self.pages.give_back(request.pages)
                request.pages = []
                ended.append(request)
        return ended


def _batch(counts: dict[Request, int]) -> Batch:
    tokens: list[int] = []
    positions: list[int] = []
    starts = [0]
    for request, count in counts.items():
        tokens += request.tokens[request.computed : request.computed + count]
        positions += range(request.computed, request.computed + count)
        starts.append(len(tokens))
    before, table = [request.computed for request in counts], [request.pages for request in counts]
    return Batch([*counts], [*counts.values()], tokens, positions, starts, before, table)
