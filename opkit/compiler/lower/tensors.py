"""Tensors as rules see them: a formula for each element. Views are maps of indices, never copies.

A tensor is either an index map into a buffer (``Stored``) or an expression over its own axes (``Lazy``): a constant, a
range, a mask of positions. A lazy tensor is inlined in every use; it gets memory only if an extern call or a result needs
it. Or it is a ``TensorPair``: the real and the imaginary part of a complex tensor, or the elements at even and at odd positions
of a real one (``view_as_real``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from opkit.compiler.ir.dtypes import PARTS
from opkit.compiler.ir.expr import Expr, const, load, op, position, where
from opkit.compiler.ir.index import ZERO, Axis, Index, IndexLike, axis, contiguous, flat, index, is_nonnegative, product
from opkit.compiler.ir.program import Buffer, Strided
from opkit.compiler.lower.registry import NoRule

Shape = tuple[Index, ...]


@dataclasses.dataclass(frozen=True)
class Stored:
    """Elements of a buffer.

    Attributes:
        buffer: the buffer.
        coordinates: in the buffer, over the tensor's formal axes (``Axis(k, shape[k])``).
        copied: whether eager mode copies these elements, so that later writes to the buffer must not change them.
    """

    buffer: Buffer
    coordinates: tuple[Index, ...]
    copied: bool = False


@dataclasses.dataclass(frozen=True)
class Lazy:
    """An expression over the tensor's formal axes that reads no memory."""

    body: Expr


@dataclasses.dataclass(frozen=True)
class TensorPair:
    """The elements of two tensors, which have the shape of the tensor itself.

    Attributes:
        first, second: the two, both real.
        which: 0 for elements of the first and 1 for those of the second, over the tensor's formal axes; None for a complex
            tensor, whose real and imaginary parts the two are.
    """

    first: Tensor
    second: Tensor
    which: Index | None = None


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of the graph while it is lowered."""

    dtype: str
    shape: Shape
    source: Stored | Lazy | TensorPair

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """The real and the imaginary part of a complex tensor.

        Raises:
            NoRule: its dtype has no arithmetic here, or it is not complex.
        """
        if not isinstance(self.source, TensorPair) or self.source.which is not None:
            raise NoRule(f"a tensor of {self.dtype}")
        return self.source.first, self.source.second

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors that the tensor consists of, without pairs."""
        if not isinstance(self.source, TensorPair):
            return (self,)
        return *self.source.first.leaves, *self.source.second.leaves

    def at(self, coordinates: Sequence[IndexLike], mask: Expr | None = None) -> Expr:
        """Return the element at coordinates; where ``mask`` is false, memory is not read.

        Raises:
            NoRule: the tensor is complex; an element of it is two expressions.
        """
        same = tuple(coordinates) == formal(self.shape)
        moved = {} if same else substitution(self.shape, coordinates)
        if isinstance(self.source, TensorPair):
            return self._chosen(self.source, coordinates, moved, mask)
        if isinstance(self.source, Lazy):
            return self.source.body if same else self.source.body.substitute(moved)
        there = self.source.coordinates if same else [c.substitute(moved) for c in self.source.coordinates]
        return load(self.source.buffer.name, self.dtype, *there, mask=mask)

    def _chosen(
        self, pair: TensorPair, coordinates: Sequence[IndexLike], moved: Mapping[Axis, IndexLike], mask: Expr | None
    ) -> Expr:
        """Return the element of the first or the second tensor of a pair."""
        if pair.which is None:
            raise NoRule("an element of a complex tensor")
        which = pair.which.substitute(moved)
        if which.constant is not None:
            return (pair.second if which.constant else pair.first).at(coordinates, mask)
        first, second = pair.first.at(coordinates, mask), pair.second.at(coordinates, mask)
        return where(op("eq", position(which), const(0, "i64")), first, second)

    def mapped(self, shape: Sequence[IndexLike], coordinates: Sequence[IndexLike], copied: bool = False) -> Tensor:
        """Return a view of ``shape`` whose element is this one's at ``coordinates`` (over the view's formal axes)."""
        moved = substitution(self.shape, coordinates)
        new = tuple(map(index, shape))
        if isinstance(self.source, TensorPair):
            return self._mapped(self.source, new, coordinates, moved, copied)
        if isinstance(self.source, Lazy):
            return Tensor(self.dtype, new, Lazy(self.source.body.substitute(moved)))
        there = tuple(c.substitute(moved) for c in self.source.coordinates)
        return Tensor(self.dtype, new, Stored(self.source.buffer, there, self.source.copied or copied))

    def _mapped(
        self,
        pair: TensorPair,
        shape: Shape,
        coordinates: Sequence[IndexLike],
        moved: Mapping[Axis, IndexLike],
        copied: bool,
    ) -> Tensor:
        """Return a view of a pair; of one of the two if it has no elements of the other."""
        first, second = (each.mapped(shape, coordinates, copied) for each in (pair.first, pair.second))
        if pair.which is None:
            return Tensor(self.dtype, shape, TensorPair(first, second))
        which = pair.which.substitute(moved)
        if which.constant is not None:
            return second if which.constant else first
        return Tensor(self.dtype, shape, TensorPair(first, second, which))

    def expanded(self, shape: Sequence[IndexLike]) -> Tensor:
        """Return the tensor broadcast to ``shape``."""
        new = tuple(map(index, shape))
        if new == self.shape:
            return self
        own = formal(new)[len(new) - len(self.shape) :]
        return self.mapped(new, [ZERO if n == 1 else a for n, a in zip(self.shape, own, strict=True)])

    def reshaped(self, shape: Sequence[IndexLike]) -> Tensor:
        """Return the elements in row-major order, in another shape."""
        new = tuple(map(index, shape))
        return self if new == self.shape else self.mapped(new, _reshape(self.shape, new))

    def strided(self) -> Strided | None:
        """Return the tensor as torch describes one, if its map is affine with strides that torch can have."""
        if isinstance(self.source, TensorPair):
            joined = _joined(self, self.source)
            return None if joined is None else joined.strided()
        if isinstance(self.source, Lazy):
            return None
        if self.source.buffer.whole is not None:
            whole = _of_whole(self, self.source)
            return None if whole is None else whole.strided()
        buffer = self.source.buffer
        if self.shape == buffer.shape and self.source.coordinates == formal(buffer.shape):
            return Strided(buffer.name, self.shape, buffer.strides, ZERO)
        rest = flat(self.source.coordinates, self.source.buffer.strides)
        strides: list[Index] = []
        for k, stride in enumerate(contiguous(self.shape)):
            step = stride if self.shape[k] == 1 else rest.coefficient(Axis(k, self.shape[k]))
            if step is None or step.axes() or not is_nonnegative(step):
                return None
            strides.append(step)
            rest = rest - step * axis(k, self.shape[k])
        return None if rest.axes() else Strided(self.source.buffer.name, self.shape, tuple(strides), rest)


def memories(tensor: Tensor) -> tuple[str, ...]:
    """Return the buffers whose memory the elements of a tensor are in, each once."""
    sources = (each.source for each in tensor.leaves)
    return tuple(dict.fromkeys(source.buffer.memory for source in sources if isinstance(source, Stored)))


def whole(buffer: Buffer) -> Tensor:
    """Return all of a buffer as a tensor."""
    parts = parts_of(buffer)
    source = TensorPair(whole(parts[0]), whole(parts[1])) if parts else Stored(buffer, formal(buffer.shape))
    return Tensor(buffer.dtype, buffer.shape, source)


def parts_of(buffer: Buffer) -> tuple[Buffer, ...]:
    """Return the real and the imaginary part of a buffer of complex numbers; () for another one.

    >>> z = Buffer("z", "c64", (index(3),), (index(1),))
    >>> [(part.name, part.dtype, part.strides, part.offset) for part in parts_of(z)]
    [('z.re', 'f32', (2,), 0), ('z.im', 'f32', (2,), 1)]
    """
    dtype = PARTS.get(buffer.dtype)
    if dtype is None:
        return ()
    strides = tuple(s * 2 for s in buffer.strides)
    return tuple(
        Buffer(f"{buffer.name}.{name}", dtype, buffer.shape, strides, buffer.role, buffer, index(k))
        for k, name in enumerate(("re", "im"))
    )


def _of_whole(tensor: Tensor, source: Stored) -> Tensor | None:
    """Return a part of real numbers as a view of all of them; None for one of complex numbers."""
    memory, at = source.buffer.whole, source.coordinates
    if memory is None or memory.dtype != tensor.dtype:
        return None
    which = 0 if source.buffer.offset == 0 else 1
    return Tensor(tensor.dtype, tensor.shape, Stored(memory, (*at[:-1], at[-1] * 2 + which), source.copied))


def _joined(tensor: Tensor, pair: TensorPair) -> Tensor | None:
    """Return a pair as one tensor over the memory that both are in; None if they do not alternate in one memory."""
    first, second = pair.first.source, pair.second.source
    if not isinstance(first, Stored) or not isinstance(second, Stored) or first.coordinates != second.coordinates:
        return None
    memory = first.buffer.whole
    apart = second.buffer.offset - first.buffer.offset
    if memory is None or memory != second.buffer.whole or memory.dtype != tensor.dtype or first.buffer.offset != 0:
        return None
    at = first.coordinates
    if pair.which is not None:
        if apart != memory.strides[-1]:
            return None
        at = (*at[:-1], at[-1] * 2 + pair.which)
    elif apart != 1:
        return None
    return Tensor(tensor.dtype, tensor.shape, Stored(memory, at, first.copied or second.copied))


def complex_of(first: Tensor, second: Tensor) -> Tensor:
    """Return the complex tensor of two real ones of one type and shape."""
    dtype = next(name for name, part in PARTS.items() if part == first.dtype)
    return Tensor(dtype, first.shape, TensorPair(first, second))


def alternating(even: Tensor, odd: Tensor, shape: Shape) -> Tensor:
    """Return the real tensor of ``shape`` whose elements at even and odd positions of the last dimension are those of two."""
    *rest, last = formal(shape)
    first, second = (each.mapped(shape, [*rest, last // 2]) for each in (even, odd))
    return Tensor(even.dtype, shape, TensorPair(first, second, last % 2))


def lazy(body: Expr, shape: Sequence[IndexLike]) -> Tensor:
    """Return a tensor whose elements are ``body`` over the formal axes of ``shape``."""
    return Tensor(body.dtype, tuple(map(index, shape)), Lazy(body))


def formal(shape: Sequence[IndexLike]) -> tuple[Index, ...]:
    """Return the axes of a shape: number k runs along dimension k; 0 where the extent is 1."""
    return _formal(tuple(shape))


@functools.lru_cache(4096)
def _formal(shape: tuple[IndexLike, ...]) -> tuple[Index, ...]:
    return tuple(axis(k, extent) for k, extent in enumerate(shape))


def substitution(shape: Shape, coordinates: Sequence[IndexLike]) -> dict[Axis, IndexLike]:
    """Return coordinates by the formal axis of a shape that they replace."""
    return {Axis(k, extent): at for k, (extent, at) in enumerate(zip(shape, coordinates, strict=True))}


def broadcast(*shapes: Shape) -> Shape:
    """Return the shape that shapes broadcast to.

    >>> broadcast((index(3), index(1)), (index(4),))
    (3, 4)
    """
    rank = max(map(len, shapes), default=0)
    padded = [(index(1),) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(next((n for n in column if n != 1), index(1)) for column in zip(*padded, strict=True))


def is_dense(shape: Shape, strides: Shape) -> bool:
    """Return whether the strides are those of a row-major tensor whose dimensions were permuted.

    >>> is_dense((index(2), index(3)), (index(1), index(2)))
    True
    """
    left = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    expected = index(1)
    while left:
        found = next((pair for pair in left if pair[1] == expected), None)
        if found is None:
            return any(n == 0 for n, _ in left)
        left.remove(found)
        expected = expected * found[0]
    return True


def channels_last(shape: Sequence[Index]) -> Shape:
    """Return the strides of a batch of images in channels-last layout."""
    _, channels, height, width = shape
    return (channels * height * width, index(1), channels * width, channels)


# ---- reshaping -------------------------------------------------------------------------------------------------------


@functools.lru_cache(4096)
def _reshape(old: Shape, new: Shape) -> list[Index]:
    """Return coordinates in the old shape over the axes of the new one, for each group of dimensions of equal products."""
    if any(n == 0 for n in (*old, *new)):
        return [ZERO] * len(old)
    coordinates: list[Index] = []
    axes = formal(new)
    start = 0
    for olds, news in _groups(old, new):
        position = flat(axes[start : start + len(news)], contiguous(news))
        steps = [position // stride for stride in contiguous(olds)]
        coordinates += [
            ZERO if n == 1 else step % n if k else step for k, (step, n) in enumerate(zip(steps, olds, strict=True))
        ]
        start += len(news)
    return coordinates


def _groups(old: Shape, new: Shape) -> list[tuple[Shape, Shape]]:
    """Return runs of dimensions of both shapes with equal products, as short as possible."""
    groups: list[tuple[Shape, Shape]] = []
    while old or new:
        m, n = _first_group(old, new)
        groups.append((old[:m], new[:n]))
        old, new = old[m:], new[n:]
    return groups


def _first_group(old: Shape, new: Shape) -> tuple[int, int]:
    """Return how many dimensions of each make the first group: the fewest with equal products, all of them if none has."""
    ends: dict[Index, int] = {}
    for n in range(1, len(new) + 1):
        ends.setdefault(product(new[:n]), n)
    found = ((m, ends[product(old[:m])]) for m in range(1, len(old) + 1) if product(old[:m]) in ends)
    return next(found, (len(old), len(new)))
