"""Run a reference on symbolic sizes, and record what it returns and what torch assumes about the sizes on the way.

Every size and every int becomes a symbol; so do floats, unless a guard or an output's layout depends on them. Sizes of 0 and 1
stay numbers, as they do under torch.compile, because broadcasting treats them differently. So do ints that are not
positive, because torch simplifies ``(n // m) // m`` to ``n // m**2`` and ``m // m`` to 1 whatever the sign of m.
"""

# pyright: reportMissingTypeStubs=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from opkit.op import torch_compile
from opkit.op import torch_private as private
from opkit.op.layout import program as p
from opkit.op.layout.sympy_code import Code, constant
from opkit.op.trace.reference_trace import concrete

R = TypeVar("R")
_HUGE = 2**40  # elements


class NotTracedError(Exception):
    """The sizes of a call cannot be traced; the message says why."""


@dataclasses.dataclass(frozen=True)
class TensorFacts:
    """The sizes, dtype and device of a row-major tensor, from which a symbolic one is made."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def described(values: Sequence[Any]) -> list[Any]:
    """Return the values of a call with tensors replaced by their facts and symbolic numbers by their hints.

    Raises:
        NotTracedError: a tensor whose strides do not follow from its sizes.
    """
    return pytree.tree_map(_described, list(values))


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return concrete(leaf)
    if leaf.layout is not torch.strided:
        raise NotTracedError(f"a tensor has the layout {leaf.layout}")
    sizes, strides = ([concrete(number) for number in numbers] for numbers in (leaf.shape, leaf.stride()))
    if strides != p.row_major(sizes):
        raise NotTracedError(f"a tensor of shape {tuple(sizes)} has the strides {tuple(strides)}: it is not row-major")
    return TensorFacts(tuple(sizes), leaf.dtype, leaf.device)


class Symbols:
    """The numbers of a call as symbols: ``code`` holds the code of each, ``conditions`` what was assumed about them.

    ``pinned`` holds the kinds ("int") and the single floats (argument, item) that stay numbers.
    """

    def __init__(self, pinned: frozenset[Any]) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.env: Any = ShapeEnv(
            allow_dynamic_output_shape_ops=True, allow_scalar_outputs=False, duck_shape=False, specialize_zero_one=True
        )
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.pinned = pinned
        self.code: dict[Any, Code] = {}
        self.floats: dict[Any, tuple[int, int]] = {}
        self.conditions: list[Code] = []

    def argument(self, kind: str, number: int, value: Any) -> Any:
        """Return an argument with symbols in place of its numbers."""
        if value is None or kind not in _MAKERS:
            return value
        make, listed = _MAKERS[kind]
        if listed:
            return [make(self, item, number, i) for i, item in enumerate(value)]
        return make(self, value, number, 0)

    def tensor(self, facts: TensorFacts, argument: int, item: int) -> FakeTensor:
        """Return a fake tensor of symbolic sizes."""
        sizes = [self._size(size, (argument, item, dim)) for dim, size in enumerate(facts.sizes)]
        self._assume_strides(facts.sizes, argument, item)
        with self.mode:
            tensor: Any = torch.empty(sizes, dtype=facts.dtype, device=facts.device)
        private.throw_on_data_pointer(tensor)
        return tensor

    def _size(self, size: int, place: tuple[int, int, int]) -> Any:
        code = (p.SIZE, *place)
        if size in (0, 1):
            self.conditions.append((*code, *constant(size), p.EQUAL))
            return size
        self.conditions.append((*constant(2), *code, p.LESS_EQUAL))
        return self._symbol(size, code)

    def _assume_strides(self, sizes: Sequence[int], argument: int, item: int) -> None:
        # torch calls a tensor contiguous whatever the strides of sizes of 1, or all of them where it is empty
        for dim, size in enumerate(sizes):
            if size == 1 or 0 in sizes:
                later = [i for i in range(dim + 1, len(sizes)) if sizes[i] > 1]
                step = (*constant(1), *(w for i in later for w in (p.SIZE, argument, item, i, p.MULTIPLY)))
                self.conditions.append((p.STRIDE, argument, item, dim, *step, p.EQUAL))

    def integer(self, value: Any, argument: int, item: int) -> Any:
        """Return a symbolic int if ``value`` is positive, else the number."""
        code, value = (p.INT, argument, item), int(value)
        if value > 0 and "int" not in self.pinned:
            self.conditions.append((*constant(1), *code, p.LESS_EQUAL))
            return self._symbol(value, code, specialize=False)
        self.conditions.append((*code, *constant(value), p.EQUAL))
        return value

    def floating(self, value: Any, argument: int, item: int) -> Any:
        """Return a symbolic float, unless it is pinned or not finite."""
        value = float(value)
        if "float" not in self.pinned and (argument, item) not in self.pinned and math.isfinite(value):
            symbol, source = self._created(value, None, specialize=False)
            self.floats[symbol] = (argument, item)
            return self.env.create_symfloatnode(symbol, hint=value, source=source)
        self.conditions.append((p.FLOAT_IS, argument, item, p.float_bits(value)))
        return value

    def _symbol(self, value: int, code: Code, specialize: bool = True) -> Any:
        symbol, source = self._created(value, True, specialize)
        self.code[symbol] = code
        return self.env.create_symintnode(symbol, hint=value, source=source)

    def _created(self, value: Any, positive: bool | None, specialize: bool) -> tuple[Any, Any]:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = ConstantSource(f"call_{len(self.code) + len(self.floats)}")
        symbol = self.env.create_symbol(
            value, source, DimDynamic.DYNAMIC, positive=positive, do_not_specialize_zero_one=not specialize
        )
        return symbol, source


_MAKERS: dict[str, tuple[Callable[[Symbols, Any, int, int], Any], bool]] = {
    "tensor": (Symbols.tensor, False),
    "tensors": (Symbols.tensor, True),
    "int": (Symbols.integer, False),
    "ints": (Symbols.integer, True),
    "float": (Symbols.floating, False),
    "floats": (Symbols.floating, True),
}
"""The function that makes arguments of each kind symbolic, and whether they are lists."""


@dataclasses.dataclass
class SymbolicRun:
    """The symbols of one run, and what the body returned."""

    symbols: Symbols
    returned: Any

    @property
    def guards(self) -> list[Any]:
        """The expressions that torch assumed to be true, including those about sizes that depend on data."""
        env = self.symbols.env
        asserted = [item.expr for items in env.deferred_runtime_asserts.values() for item in items]
        return [*[guard.expr for guard in env.guards], *asserted]

    def floats(self, outputs: Sequence[torch.Tensor]) -> frozenset[tuple[int, int]]:
        """Return the floats (argument, item) on which a guard, or a size or stride of an output, depends."""
        numbers = [expression(n) for tensor in outputs for n in (*tensor.shape, *tensor.stride())]
        used: set[Any] = set().union(*[e.free_symbols for e in (*self.guards, *numbers)])
        return frozenset(place for symbol, place in self.symbols.floats.items() if symbol in used)


def run(
    body: Callable[..., Any],
    kinds: Sequence[str],
    values: Sequence[Any],
    names: Sequence[str | None],
    pinned: frozenset[Any],
) -> SymbolicRun:
    """Run ``body`` on symbolic copies of ``values``, those with a name as keyword arguments.

    Raises:
        NotTracedError: a tensor is not row-major, or a setting makes torch leave out guards.
        Exception: the error that the body raised.
    """
    setting = torch_compile.guards_left_out()
    if setting:
        raise NotTracedError(f"torch.fx.experimental._config.{setting} is on, under which torch leaves out guards")
    facts = described(values)
    return isolated(lambda: _run(body, kinds, facts, names, pinned))


def _run(
    body: Callable[..., Any],
    kinds: Sequence[str],
    values: Sequence[Any],
    names: Sequence[str | None],
    pinned: frozenset[Any],
) -> SymbolicRun:
    with private.no_modes(), torch.inference_mode(False), torch.enable_grad():
        symbols = Symbols(pinned)
        arguments = [symbols.argument(kind, i, v) for i, (kind, v) in enumerate(zip(kinds, values, strict=True))]
        args = [value for value, name in zip(arguments, names, strict=True) if name is None]
        kwargs = {name: value for value, name in zip(arguments, names, strict=True) if name is not None}
        with private.symbolic_tracing(symbols.mode):
            return SymbolicRun(symbols, body(*args, **kwargs))


def doubled(values: Sequence[Any]) -> list[Any]:
    """Return the values of a call with fake tensors of twice the sizes."""
    with private.no_modes(), torch.inference_mode(False):
        mode = FakeTensorMode()
        return pytree.tree_map(functools.partial(_doubled, mode), described(values))


def _doubled(mode: FakeTensorMode, leaf: Any) -> Any:
    if not isinstance(leaf, TensorFacts):
        return leaf
    with mode:
        return torch.empty(
            [size if size < 2 else 2 * size for size in leaf.sizes], dtype=leaf.dtype, device=leaf.device
        )


def isolated(function: Callable[[], R]) -> R:
    """Call ``function`` outside of the caller's transforms, autocast and function modes.

    They belong to the thread, so a new thread has none.
    """
    if private.functorch_level() is None and not private.any_autocast() and not private.function_modes():
        return function()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def expression(value: Any) -> Any:
    """Return the sympy expression of a size or stride."""
    import sympy

    return value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(int(value))
