"""Draws random programs, for Hypothesis.

A program grows a line at a time. Each line is tried on real tensors as it is drawn, and kept if eager torch takes it; so shapes
and dtypes need no rules here. What needs rules is exactness: a comparison, a rounding or an ``argmax`` of numbers that two
correct compilers may compute a little differently has two correct results. So such lines take *exact* values only: those that no
rounding has touched, such as inputs on a coarse grid and whatever views, selections and comparisons make of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from random_graphs import DTYPES, LAYOUTS, Input, Program, namespace
from torch import Tensor

_LARGEST, _MOST = 600, 4096  # elements of an argument, and of any value
_TRIES = 3  # for each line: some do not fit
_SIZES = ((5, 8), (3, 1), (8, 17), (2, 3), (1, 33), (0, 2), (4, 5, 2), (1, 1))


@dataclasses.dataclass
class Growing:
    """A program while it grows.

    Attributes:
        draw: Hypothesis's.
        scope: the names so far with their tensors, which the lines have been run on.
        exact: the names whose values no rounding has touched.
        gradients: whether gradients will be asked: then kinks, too, take exact values alone.
    """

    draw: Callable[[st.SearchStrategy[Any]], Any]
    scope: dict[str, Any]
    exact: set[str]
    gradients: bool
    special: bool = False
    lines: list[str] = dataclasses.field(default_factory=list)

    def names(self, wanted: Callable[[Tensor], bool] = lambda value: True, exact: bool = False) -> list[str]:
        """The names of tensors that are as wanted, the newest first, towards which examples shrink."""
        named = [name for name in self.scope if name[0] in "tv" and name[1:].isdigit()]
        return [n for n in reversed(named) if wanted(self.scope[n]) and (not exact or n in self.exact)]

    def pick(self, wanted: Callable[[Tensor], bool] = lambda value: True, exact: bool = False) -> str:
        """One of those names.

        Raises:
            UnfitError: there is none.
        """
        names = self.names(wanted, exact)
        if not names:
            raise UnfitError
        return self.draw(st.sampled_from(names))

    def value(self, name: str) -> Tensor:
        return self.scope[name]

    def one_of(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def dim(self, name: str) -> int:
        """One of the dimensions of a value, from either end."""
        rank = self.value(name).ndim
        if not rank:
            raise UnfitError
        return self.draw(st.integers(-rank, rank - 1))

    def new(self, expression: str, exact: bool) -> None:
        """Add a line that names the value of ``expression``, if eager torch takes it and the result is not large."""
        name = f"v{len(self.lines)}"
        self._run(f"{name} = {expression}")
        made = self.scope[name]
        if not isinstance(made, Tensor) or made.numel() > _MOST or made.is_complex():
            del self.scope[name]
            raise UnfitError
        self.lines.append(f"{name} = {expression}")
        if exact:
            self.exact.add(name)

    def write(self, statement: str, into: str, exact: bool) -> None:
        """Add a line that writes into a value: what shares its memory is exact no more, unless what is written is."""
        if _miswritten(self.value(into)):
            raise UnfitError
        self._run(statement)
        self.lines.append(statement)
        if not exact:
            memory = _memory(self.value(into))
            self.exact -= {name for name in self.names() if _memory(self.value(name)) == memory}

    def _run(self, statement: str) -> None:
        try:
            exec(statement, self.scope)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
            raise UnfitError from error


class UnfitError(Exception):
    """A line that cannot be added to the program as it stands."""


_UNARY = (
    "{0}.sin()", "{0}.tanh()", "{0}.sigmoid()", "{0} * {0}", "F.silu({0})", "F.gelu({0})",
    "F.gelu({0}, approximate='tanh')", "{0}.clamp(-8.0, 4.0).exp()", "({0} * {0} + 1).log()",
    "({0} * {0} + 0.5).sqrt()", "({0} * {0} + 0.5).rsqrt()", "{0}.atan()", "{0}.erf()", "F.softplus({0})",
    "({0} * {0} + 1).reciprocal()", "F.dropout({0}, 0.5, training=False) + 0.5", "{0} + 1.5", "0.3 * {0}", "1 - {0}",
    "{0} / 3", "{0}.square()", "{0}.expm1().clamp(max=9.0)",
)  # fmt: skip
_KINKED = (
    "{0}.relu()", "{0}.abs()", "{0}.clamp(-1.0, 1.5)", "{0}.clamp(min=0.25)", "F.leaky_relu({0}, 0.25)",
    "F.hardtanh({0})",
)  # fmt: skip
_STEPS = (
    "{0}.floor()", "{0}.ceil()", "{0}.round()", "{0}.trunc()", "{0}.sign()", "{0} > 0", "{0} <= 1", "{0} == 0.5",
    "{0} != 0", "torch.isnan({0})", "torch.isfinite({0})", "{0}.logical_not()", "{0}.signbit()",
)  # fmt: skip
_BINARY = (
    "{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / ({1} * {1} + 1)", "torch.add({0}, {1}, alpha=2)",
    "torch.lerp({0}, {1}, 0.25)", "torch.atan2({0}, {1} * {1} + 1)", "torch.logaddexp({0}, {1})",
    "torch.addcmul({0}, {1}, {1}, value=0.5)",
)  # fmt: skip
_CHOICES = (
    "torch.maximum({0}, {1})", "torch.minimum({0}, {1})",
)  # fmt: skip
_COMPARISONS = (
    "{0} < {1}", "{0} >= {1}", "{0} == {1}", "{0} != {1}", "torch.logical_xor({0}, {1})",
)  # fmt: skip
_WHOLE = (
    "{0} + {1}", "{0} * {1}", "{0} - {1}", "{0} // ({1} % 5 + 1)", "{0} % ({1} % 5 + 1)", "{0} & {1}", "{0} | {1}",
    "{0} ^ {1}", "torch.div({0}, {1} % 5 + 1, rounding_mode='trunc')", "torch.fmod({0}, {1} % 5 + 1)",
    "torch.bitwise_left_shift({0}, {1} % 7)", "torch.bitwise_right_shift({0}, {1} % 7)", "torch.maximum({0}, {1})",
    "{0} * 2147483647", "-{0}", "{0}.abs()", "~{0}",
)  # fmt: skip
_LOGIC = (
    "{0} & {1}", "{0} | {1}", "{0} ^ {1}", "~{0}",
)  # fmt: skip
_REDUCTIONS = (
    "sum", "mean", "var", "logsumexp", "std",
)  # fmt: skip
_PICKS = (
    "amax", "amin",
)  # fmt: skip
_ROW_WISE = (
    "torch.softmax({0}, {1})", "torch.log_softmax({0}, {1})", "torch.cumsum({0}, {1})", "F.layer_norm({0}, {0}.shape[-1:])",
    "F.rms_norm({0}, {0}.shape[-1:], eps=1e-5)", "F.normalize({0} + 2, dim={1})",
)  # fmt: skip
_VIEWS = (
    "{0}.unsqueeze({1})", "{0}.transpose({1}, 0)", "{0}.flatten()", "{0}.unflatten({1}, (-1, 1))", "{0}.squeeze({1})",
    "{0}.movedim({1}, 0)", "{0}.narrow({1}, 0, {0}.shape[{1}] // 2)", "{0}.select({1}, -1)", "{0}[::2]", "{0}[1:]",
    "{0}[..., :-1]", "{0}[None]", "{0}.diagonal()", "{0}.reshape(-1)", "{0}.t()", "{0}.expand(2, *{0}.shape)",
    "{0}.chunk(2, {1})[-1]", "{0}.split(2, {1})[0]", "{0}.unfold({1}, 2, 1)",
)  # fmt: skip
_MOVES = (
    "{0}.flip({1})", "{0}.roll(1, {1})", "{0}.clone()", "{0}.contiguous()", "{0}.repeat_interleave(2, {1})",
    "torch.tril({0})", "F.pad({0}, (1, 2))", "F.pad({0}, (-1, 1), value=0.5)", "{0}.repeat(2, *[1] * {0}.ndim)",
    "torch.zeros_like({0})", "torch.full_like({0}, 2)", "{0}.detach()", "-{0}",
)  # fmt: skip
_JOINS = (
    "torch.cat(({0}, {1}), {2})", "torch.stack(({0}, {1}), {2})", "torch.cat(({0}, {0}, {1}))",
)  # fmt: skip
_WRITES = (
    "{0}.add_({1})", "{0}.mul_({1})", "{0}.copy_({1})", "{0}[1:] = {1}[1:]", "{0}[..., 0] = {1}[..., -1]",
    "{0}.sub_({1}, alpha=2)", "{0}[::2].copy_({1}[::2])", "{0}.t().copy_({1}.t())",
)  # fmt: skip
_FILLS = (
    "{0}.fill_(1)", "{0}.zero_()", "{0}[..., 0] = 2", "{0}[:1] = 0",
)  # fmt: skip


def _floating(value: Tensor) -> bool:
    return value.is_floating_point()


def _overlaps(value: Tensor) -> bool:
    """Whether elements may share memory."""
    reach = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _miswritten(value: Tensor) -> bool:
    """Whether what is written there is lost before any backend sees the graph.

    AOTAutograd takes a row that is repeated by a stride of 0 for many rows and refuses windows that overlap, and Dynamo
    takes a scalar of float64 for a number.
    """
    return _overlaps(value) or (not value.ndim and value.dtype == torch.float64)


def _whole(value: Tensor) -> bool:
    return value.dtype in (torch.int64, torch.int32)


def _logical(value: Tensor) -> bool:
    return value.dtype == torch.bool


def _unary(growing: Growing) -> None:
    growing.new(growing.one_of(*_UNARY).format(growing.pick(_floating)), exact=False)


def _kinked(growing: Growing) -> None:
    name = growing.pick(_floating, exact=growing.gradients)
    growing.new(growing.one_of(*_KINKED).format(name), exact=name in growing.exact)


def _step(growing: Growing) -> None:
    growing.new(growing.one_of(*_STEPS).format(growing.pick(exact=True)), exact=True)


def _binary(growing: Growing) -> None:
    growing.new(growing.one_of(*_BINARY).format(growing.pick(_floating), growing.pick()), exact=False)


def _choice(growing: Growing) -> None:
    names = [growing.pick(_floating, exact=growing.gradients) for _ in range(2)]
    growing.new(growing.one_of(*_CHOICES).format(*names), exact=growing.exact.issuperset(names))


def _comparison(growing: Growing) -> None:
    kind = growing.one_of(_floating, _whole)
    growing.new(growing.one_of(*_COMPARISONS).format(growing.pick(kind, True), growing.pick(kind, True)), exact=True)


def _integers(growing: Growing) -> None:
    growing.new(growing.one_of(*_WHOLE).format(growing.pick(_whole), growing.pick(_whole)), exact=True)


def _booleans(growing: Growing) -> None:
    growing.new(growing.one_of(*_LOGIC).format(growing.pick(_logical), growing.pick(_logical)), exact=True)


def _where(growing: Growing) -> None:
    mask, names = growing.pick(_logical), [growing.pick(), growing.pick()]
    shape = growing.one_of("torch.where({0}, {1}, {2})", "{1}.masked_fill({0}, 0.5)", "torch.where({0}, {1}, -1)")
    growing.new(shape.format(mask, *names), exact=_agree(growing, names))


def _agree(growing: Growing, names: list[str]) -> bool:
    """Whether values are exact, and stay so together: of one dtype, so that none is rounded to another's."""
    return growing.exact.issuperset(names) and len({growing.value(name).dtype for name in names}) == 1


def _cast(growing: Growing) -> None:
    to = growing.one_of(*DTYPES)
    floating = DTYPES[to].is_floating_point
    steps = not floating and not growing.special
    name = growing.pick(lambda value: floating or steps or not _floating(value), exact=not floating)
    growing.new(f"{name}.to({to})", exact=not floating)


def _reduction(growing: Growing) -> None:
    name = growing.pick(_floating)
    dims = growing.one_of(growing.dim(name), [growing.dim(name)], list(range(growing.value(name).ndim)))
    kind, keep = growing.one_of(*_REDUCTIONS), growing.one_of(True, False)
    if kind == "std" and growing.gradients:
        raise UnfitError  # infinite where all numbers are one
    correction = ", correction=0" if kind in ("var", "std") else ""
    growing.new(f"{name}.{kind}(dim={dims}{correction}, keepdim={keep})", exact=False)


def _pick_reduction(growing: Growing) -> None:
    name = growing.pick(_floating, exact=growing.gradients)
    kind, keep = growing.one_of(*_PICKS), growing.one_of(True, False)
    growing.new(f"{name}.{kind}(dim={growing.dim(name)}, keepdim={keep})", exact=name in growing.exact)


def _counting(growing: Growing) -> None:
    """Reductions with one right result: of integers and booleans, and the places of extremes."""
    name = growing.pick(exact=True)
    shape = (
        "{0}.argmax({1})",
        "{0}.argmin({1}, keepdim=True)",
        "{0}.any({1})",
        "{0}.all({1}, keepdim=True)",
        "{0}.count_nonzero({1})",
    )
    if not _floating(growing.value(name)):
        shape += "{0}.sum({1})", "{0}.prod({1})", "{0}.cumsum({1})"
    growing.new(growing.one_of(*shape).format(name, growing.dim(name)), exact=True)


def _row_wise(growing: Growing) -> None:
    name = growing.pick(_floating)
    growing.new(growing.one_of(*_ROW_WISE).format(name, growing.dim(name)), exact=False)


def _view(growing: Growing) -> None:
    name = growing.pick()
    at = growing.dim(name) if growing.value(name).ndim else 0
    growing.new(growing.one_of(*_VIEWS).format(name, at), exact=name in growing.exact)


def _memory_view(growing: Growing) -> None:
    """The elements in the order in which they lie in memory."""
    name = growing.pick(lambda value: not _overlaps(value))
    growing.new(f"{name}.as_strided(({name}.numel(),), (1,))", exact=name in growing.exact)


def _move(growing: Growing) -> None:
    name = growing.pick()
    growing.new(growing.one_of(*_MOVES).format(name, growing.dim(name)), exact=name in growing.exact)


def _join(growing: Growing) -> None:
    names = [growing.pick(), growing.pick()]
    growing.new(growing.one_of(*_JOINS).format(*names, growing.dim(names[0])), exact=_agree(growing, names))


def _indexed(growing: Growing) -> None:
    """Reads at places that other numbers give, kept within bounds."""
    name, index = growing.pick(lambda value: value.ndim > 0), growing.pick(_whole)
    at = growing.dim(name)
    bounded = f"{index} % max({name}.shape[{at}], 1)"
    shape = growing.one_of(
        f"{name}.index_select({at}, ({bounded}).reshape(-1))", f"torch.gather({name}, {at}, ({bounded}).long())",
        f"{name}[{index} % max(len({name}), 1)]", f"{name}.take_along_dim(({bounded}).long(), {at})",
        f"F.embedding({index} % max(len({name}), 1), {name})",
    )  # fmt: skip
    growing.new(shape, exact=name in growing.exact)


def _scattered(growing: Growing) -> None:
    name, index = growing.pick(lambda value: value.ndim > 0), growing.pick(_whole)
    at = growing.dim(name)
    rows = f"({index}.reshape(-1)[:{name}.shape[{at}]] % max({name}.shape[{at}], 1))"
    source = f"{name}.narrow({at}, 0, min({index}.numel(), {name}.shape[{at}]))"
    exact = not _floating(growing.value(name))
    growing.new(f"{name}.index_add({at}, {rows}, {source})", exact=exact and name in growing.exact)


def _product(growing: Growing) -> None:
    names = [growing.pick(_floating), growing.pick(_floating)]
    growing.new(growing.one_of("{0} @ {1}", "{0} @ {1}.mT", "F.linear({0}, {1})").format(*names), exact=False)


def _write(growing: Growing) -> None:
    into, source = growing.pick(), growing.pick()
    if _memory(growing.value(into)) == _memory(growing.value(source)) and into != source:
        raise UnfitError  # eager reads some elements before it writes them, and some after
    statement = growing.one_of(*_WRITES)
    moves = "copy_" in statement or " = " in statement
    growing.write(statement.format(into, source), into, exact=moves and _agree(growing, [into, source]))


def _fill(growing: Growing) -> None:
    into = growing.pick()
    growing.write(growing.one_of(*_FILLS).format(into), into, exact=True)


def _masked_write(growing: Growing) -> None:
    into, mask = growing.pick(), growing.pick(_logical)
    growing.write(f"{into}[{mask}] = 1", into, exact=True)


LINES: tuple[Callable[[Growing], None], ...] = (
    _unary, _unary, _binary, _binary, _kinked, _step, _choice, _comparison, _integers, _booleans, _where, _cast, _reduction,
    _reduction, _pick_reduction, _counting, _row_wise, _view, _view, _memory_view, _move, _join, _indexed, _scattered, _product,
    _write, _fill,
    _masked_write,
)  # fmt: skip


@st.composite
def inputs(draw: Callable[..., Any], sizes: tuple[int, ...], gradients: bool = False) -> Input:
    """An argument, of one of the few sizes of its program, so that arguments go together."""
    shape = tuple(draw(st.lists(st.sampled_from(sizes), max_size=3).filter(lambda shape: math.prod(shape) <= _LARGEST)))
    floats = ("F32", "F32", "F64") if gradients else ("F32", "F32", "BF16", "F64", "I64", "I32", "BOOL")
    dtype = draw(st.sampled_from(floats))
    numbers = ("grid",)
    if DTYPES[dtype].is_floating_point:
        numbers = ("grid", "normal") if gradients else ("grid", "normal", "grid", "special")
    return Input(shape, dtype, draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(numbers)), draw(st.integers(0, 99)))


@st.composite
def programs(draw: Callable[..., Any], gradients: bool = False, most: int = 12) -> Program:
    """A program of up to ``most`` lines."""
    sizes = draw(st.sampled_from(_SIZES))
    given = tuple(draw(st.lists(inputs(sizes, gradients), min_size=1, max_size=4)))
    scope = namespace() | {f"t{at}": each.tensor(gradients) for at, each in enumerate(given)}
    exact = {f"t{at}" for at, each in enumerate(given) if each.numbers != "normal"}
    growing = Growing(draw, scope, exact, gradients, any(each.numbers == "special" for each in given))
    for _ in range(draw(st.integers(2, _TRIES * most))):
        if len(growing.lines) == most:
            break
        try:
            draw(st.sampled_from(LINES))(growing)
        except UnfitError:
            continue
    names = growing.names()
    outputs = draw(st.lists(st.sampled_from(names), min_size=1, max_size=4))
    return Program(given, tuple(growing.lines), tuple(outputs))
