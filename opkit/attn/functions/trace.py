"""Trace a user's ``mask_mod`` or ``score_mod`` to an expression, once for functions of the same code and the same captures.

The function is run with fake tensors of one element, and the compiler's rules of ATen operators make the expression. Captured
tensors become loads. Captured integers and floats become variables, so that another value needs no other kernel; where the
function needs their values, as ``range(window)`` does, they are constants.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from opkit.attn.functions.captures import Captures, Learned, Local, learned, local_tensors
from opkit.attn.functions.expression import INDEX, Function, coordinates, indexed, load, loads_of
from opkit.attn.functions.inlining import Inlining, narrowed
from opkit.compiler.ir import expr
from opkit.compiler.ir.dtypes import DTYPES, is_int
from opkit.compiler.ir.expr import Expr, rewrite
from opkit.errors import ArgumentError, ArgumentTypeError, DtypeError, ShapeError

Kind = Literal["mask", "score"]
_PARAMETERS = {"mask": ("b", "h", "q_idx", "kv_idx"), "score": ("score", "b", "h", "q_idx", "kv_idx")}
VARIABLES = ("score", "b", "h", "i", "j")
_MAX_CACHED = 256


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function's expression, and the values of what it captures in this call.

    Attributes:
        root: the expression, as :mod:`opkit.attn.functions.expression` says.
        tensors: the captured tensors.
        integers, floats: the captured numbers.
    """

    root: Expr
    tensors: tuple[Tensor, ...]
    integers: tuple[int, ...]
    floats: tuple[float, ...]

    def part(self, ranges: Mapping[str, range]) -> Traced:
        """Return the function of some of the batches, heads, queries or keys ("b", "h", "i", "j"), counted from 0 each.

        Tensors that are indexed by them are cut to them. What else depends on them adds where they begin, a captured number.
        """
        axes = tuple(sorted(ranges))
        root, cuts = _shifted(self.root, axes, len(self.integers))
        tensors = list[Tensor]()
        for place, dims in cuts:
            tensor = self.tensors[place]
            for dim, axis in dims:
                tensor = tensor.narrow(dim, ranges[axis].start, len(ranges[axis]))
            tensors.append(tensor)
        starts = [ranges[axis].start for axis in axes]
        return Traced(root, tuple(tensors), (*self.integers, *starts), self.floats)

    def function(self, root: Expr, tensors: list[Tensor]) -> Function:
        """Return an expression of the same captures as a function whose tensors are appended to a program's.

        Raises:
            ArgumentError: a captured integer is larger than the type in which the expression computes with it.
        """
        for place, dtype in _narrowed_integers(root):
            number, limit = self.integers[place], 1 << 8 * DTYPES[dtype].bytes - 1
            if type(number) is int and not -limit <= number < limit:
                raise ArgumentError(
                    f"opkit.attention: a function captures the integer {number}, and computes with it in {dtype}, where torch "
                    "wraps it around. Convert what it meets to int64, as in q_idx.long()."
                )
        names = sorted({node.data[0] for node in loads_of(root)}, key=lambda name: int(name[1:]))
        renamed = {name: f"t{k}" for k, name in enumerate(names)}
        places = tuple(_number_in(tensors, self.tensors[int(name[1:])]) for name in names)
        return Function(_renamed(root, tuple(renamed.items())), places, self.integers, self.floats)


_Cuts = tuple[
    tuple[int, tuple[tuple[int, str], ...]], ...
]  # tensors, each with the dimensions to cut, and by which axes


@functools.lru_cache(256)
def _shifted(root: Expr, axes: tuple[str, ...], count: int) -> tuple[Expr, _Cuts]:
    """Return the expression of :meth:`Traced.part`, whose captured integers from ``count`` on are where axes begin."""
    starts = {axis: expr.cast(expr.var(f"n{count + k}", "i64"), INDEX) for k, axis in enumerate(axes)}
    cuts: dict[tuple[int, tuple[tuple[int, str], ...]], int] = {}
    variables = dict(indexed(root))

    def change(node: Expr) -> Expr:
        if node.op == "var" and node.data in starts:
            return expr.op("add", node, starts[node.data])
        if node.op != "load":
            return node
        cut = {dim: axis for dim, axis in enumerate(variables[node]) if axis in starts}
        number = cuts.setdefault((int(node.data[0][1:]), tuple(cut.items())), len(cuts))
        at = [each if dim in cut else rewrite(each, change) for dim, each in enumerate(coordinates(node))]
        return load(f"t{number}", node.dtype, *at)

    return rewrite(root, change), tuple(cuts)


@functools.lru_cache(1024)
def _narrowed_integers(root: Expr) -> tuple[tuple[int, str], ...]:
    """Return the places of captured integers that are converted to narrower ones, and to which."""
    casts = [node for node in root.walk() if node.op == "cast" and node.args[0].op == "var" and is_int(node.dtype)]
    names = [(str(node.args[0].data), node.dtype) for node in casts]
    return tuple((int(name[1:]), dtype) for name, dtype in names if name.startswith("n") and DTYPES[dtype].bytes < 8)


def _number_in(tensors: list[Tensor], tensor: Tensor) -> int:
    for number, known in enumerate(tensors):
        if known is tensor:
            return number
    tensors.append(tensor)
    return len(tensors) - 1


@functools.lru_cache(1024)
def _renamed(root: Expr, pairs: tuple[tuple[str, str], ...]) -> Expr:
    if all(old == new for old, new in pairs):
        return root
    names = dict(pairs)

    def change(node: Expr) -> Expr:
        if node.op != "load":
            return node
        return load(names[node.data[0]], node.dtype, *(_renamed(at, pairs) for at in coordinates(node)))

    return rewrite(root, change)


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """An expression, and where in a function's captures its tensors and numbers are found.

    Attributes:
        root: the expression.
        tensors: of each tensor its place among the captured ones, or itself if the function has created it.
        parametrised: whether captured numbers are variables.
        reads: whether the function has read values of tensors, so that it is to be traced again.
    """

    root: Expr
    tensors: tuple[int | Tensor, ...]
    parametrised: bool
    reads: bool = False


_recipes: dict[Any, _Recipe] = {}


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores, by that of the queries."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def trace(
    function: Callable[..., Any], kind: Kind, dtype: torch.dtype, device: torch.device, local: Local | None = None
) -> Traced:
    """Return a function's expression and the values of its captures.

    Args:
        function: a ``mask_mod(b, h, q_idx, kv_idx)`` or a ``score_mod(score, b, h, q_idx, kv_idx)``.
        kind: which of the two.
        dtype: of the score.
        device: of the call.
        local: makes this process's tensor of a ``DTensor`` that it captures.

    Raises:
        ArgumentTypeError: it is not callable with these arguments, or calls what cannot be computed element by element.
        ArgumentError: it branches on values, writes to a tensor, or captures a ``DTensor`` or one of another device.
        DtypeError, ShapeError: its result is not bool, or floating for a score; or not one number.
    """
    return trace_captures(Captures.of(function), function, kind, dtype, device, local)


def trace_captures(
    captures: Captures, function: Callable[..., Any], kind: Kind, dtype: torch.dtype, device: torch.device,
    local: Local | None = None,
) -> Traced:  # fmt: skip
    """Return the same from a function's captures."""
    constants = [cell.cell_contents for cell in captures.numbers] if dtype == torch.float64 else []  # of the expression
    known = captures.key is not None and all(type(x) in (int, float) for x in constants)
    key = (kind, dtype, device, captures.key, tuple(constants)) if known else None
    recipe = _recipes.get(key) if key is not None else None
    if recipe is None:
        recipe = _traced(function, kind, dtype, device, captures)
        found = all(isinstance(each, int) or not each.shape for each in recipe.tensors)
        if key is not None and captures.key is not None and found and not recipe.reads:
            if len(_recipes) >= _MAX_CACHED:
                _recipes.clear()
            _recipes[key] = recipe
    tensors = [captures.tensors[each] if isinstance(each, int) else each for each in recipe.tensors]
    tensors = local_tensors(tensors, describe(function), local)
    numbers = [cell.cell_contents for cell in captures.numbers] if recipe.parametrised else []
    integers = tuple(x for x in numbers if not isinstance(x, float))
    return Traced(recipe.root, tensors, integers, tuple(x for x in numbers if isinstance(x, float)))


# ---- the trace -------------------------------------------------------------------------------------------------------


def _traced(function: Any, kind: Kind, dtype: torch.dtype, device: torch.device, captures: Captures) -> _Recipe:
    from opkit.attn.functions import torch_private as private  # which imports sympy

    if not isinstance(function, torch.fx.GraphModule):
        _check_signature(function, kind)
    name = describe(function)
    code = getattr(captures.function, "__code__", None)  # graphs have none
    known = Learned() if code is None else learned(code)
    if captures.numbers and not known.needs_numbers and dtype != torch.float64:
        try:
            return _run(captures, function, kind, dtype, device, True)
        except private.DataDependent:
            known.needs_numbers, captures.key = True, None  # the key is without their values
    try:
        return _run(captures, function, kind, dtype, device, False)
    except private.DataDependent as error:
        raise ArgumentError(
            f"opkit.attention: {name} branches on a value, or reads one: {line_of(error, function)} It is traced once, with "
            "tensors of unknown values. Use torch.where in place of if, and & | ~ in place of and, or, not."
        ) from error


def _run(
    captures: Captures, function: Any, kind: Kind, dtype: torch.dtype, device: torch.device, parametrised: bool
) -> _Recipe:
    from opkit.attn.functions import torch_private as private

    numbers = [cell.cell_contents for cell in captures.numbers] if parametrised else []
    kinds = [torch.float32 if isinstance(x, float) else torch.int64 for x in numbers]
    name = describe(function)

    def called(*arguments: Tensor) -> Any:
        count = len(VARIABLES)
        variables, given, tensors = (
            arguments[:count],
            arguments[count : count + len(numbers)],
            arguments[count + len(numbers) :],
        )
        run = function if captures.function is None else captures.substituted(given, tensors)
        return _as_tensor(run(*(variables if kind == "score" else variables[1:])), variables[0], kind, name)

    shapes = [((1,), dtype), *[((1,), torch.int32)] * 4, *[((), each) for each in kinds]]
    try:
        graph, reads = private.traced_graph(
            called, shapes, [captures.tensors[k] for _, k in captures.tensor_cells], device
        )
        recipe = dataclasses.replace(_recipe(graph, captures, numbers, name, device), reads=reads)
    except private.DataDependent:
        raise
    except private.Writes as error:
        raise ArgumentError(
            f"opkit.attention: {name} writes to a tensor: {line_of(error, function)} Compute a new one instead."
        ) from error
    except (ArgumentError, ArgumentTypeError, DtypeError, ShapeError):
        raise
    except Exception as error:
        raise _explained(error, function, name, captures, device) from error
    if reads and hasattr(captures.function, "__code__"):
        learned(captures.function.__code__).reads_values = True
    if kind == "score" and dtype != torch.float64:
        return dataclasses.replace(recipe, root=narrowed(recipe.root))
    return recipe


def _as_tensor(result: Any, like: Tensor, kind: Kind, name: str) -> Tensor:
    """Return a function's result as a tensor of one element."""
    if isinstance(result, (bool, int, float)):
        result = torch.full_like(like, result, dtype=torch.bool if isinstance(result, bool) else like.dtype)
    if not isinstance(result, Tensor):
        raise ArgumentTypeError(f"opkit.attention: {name} returned {type(result).__name__}, expected a tensor.")
    if result.numel() != 1:
        raise ShapeError(
            f"opkit.attention: {name} returned shape {tuple(result.shape)} for one query and key, expected one number. Index "
            "every dimension of the tensors that it captures."
        )
    if kind == "mask" and result.dtype != torch.bool:
        raise DtypeError(
            f"opkit.attention: {name} returned {result.dtype}, a mask_mod returns torch.bool. Compare: x != 0."
        )
    if kind == "score" and not result.is_floating_point():
        raise DtypeError(
            f"opkit.attention: {name} returned {result.dtype}, a score_mod returns the new score, floating."
        )
    return result.reshape(1)


def _explained(error: Exception, function: Any, name: str, captures: Captures, device: torch.device) -> Exception:
    """Return the error for one that running the function raised."""
    local_tensors(captures.tensors, name, None)
    wrong = [x for x in captures.tensors if x.device != device]
    if wrong:
        return _misplaced(wrong[0], device, name, line_of(error, function))
    return ArgumentTypeError(
        f"opkit.attention: {name} raised {type(error).__name__}: {error} {line_of(error, function)}"
    )


def _misplaced(tensor: Tensor, device: torch.device, name: str, line: str = "") -> ArgumentError:
    there = f"on {tensor.device}, q is on {device}{': ' if line else '.'}{line}"
    return ArgumentError(
        f"opkit.attention: {name} captures a tensor of shape {tuple(tensor.shape)} {there} Move it with .to(q.device)."
    )


def _check_signature(function: Any, kind: Kind) -> None:
    name, wanted = describe(function), _PARAMETERS[kind]
    try:
        inspect.signature(function).bind(*wanted)
    except TypeError as error:
        other = _PARAMETERS["mask" if kind == "score" else "score"]
        raise ArgumentTypeError(
            f"opkit.attention: {name} is called as {kind}_mod({', '.join(wanted)}), which does not fit its parameters: {error}. "
            f"A function of ({', '.join(other)}) is passed as {'mask' if kind == 'score' else 'bias'}=."
        ) from error
    except ValueError:  # builtins have no signature
        return


def describe(function: Any) -> str:
    """Return how errors name a function: with its file and line, if it has any."""
    code = getattr(function, "__code__", None)
    if isinstance(function, torch.fx.GraphModule):
        return "a function that is compiled"
    if code is None:
        return getattr(function, "__qualname__", None) or repr(function)
    return f"{function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"


def line_of(error: BaseException, function: Any) -> str:
    """Return the user's line in which an error was raised: the last one in the function's file."""
    code = getattr(function, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    return f"at {own[-1].filename}:{own[-1].lineno}: {own[-1].line}." if own else ""


def _recipe(graph: Any, captures: Captures, numbers: list[Any], name: str, device: torch.device) -> _Recipe:
    from opkit.attn.functions import torch_private as private

    program, constants = private.lowered(graph)
    bodies: dict[str, Any] = {}
    for step in program.steps:
        body = getattr(step, "body", None)
        if body is None or step.reduction is not None or step.update is not None:
            raise ArgumentTypeError(
                f"opkit.attention: {name} calls {getattr(step, 'origin', '') or step.target}, which does not compute one element "
                "from others. Compute it before the call, and capture the result."
            )
        bodies[step.buffer] = step
    inputs = dict(zip(program.inputs, (*VARIABLES, *_number_names(numbers)), strict=False))
    cells = dict(zip(program.inputs[len(inputs) :], captures.tensor_cells, strict=True))
    tensors: list[int | Tensor] = []

    def captured(buffer: str) -> str:
        tensor = constants[buffer] if buffer in constants else captures.tensors[cells[buffer][1]]
        place = _place(tensor, captures, device, name)
        known = [
            k for k, each in enumerate(tensors) if each is place or (type(each) is type(place) is int and each == place)
        ]
        if not known:
            tensors.append(place)
        return f"t{known[0] if known else len(tensors) - 1}"

    root = Inlining(bodies, inputs, captured).element(program.outputs[0].buffer)
    return _Recipe(root, tuple(tensors), bool(numbers))


def _number_names(numbers: list[Any]) -> list[str]:
    counts = {"n": 0, "x": 0}
    names: list[str] = []
    for each in numbers:
        letter = "x" if isinstance(each, float) else "n"
        names.append(f"{letter}{counts[letter]}")
        counts[letter] += 1
    return names


def _place(tensor: Tensor, captures: Captures, device: torch.device, name: str) -> int | Tensor:
    """Return a captured tensor's place among the captures; one that the function has created itself, or read from an object."""
    for place, known in enumerate(captures.tensors):
        if known is tensor:
            if tensor.device != device:
                raise _misplaced(tensor, device, name)
            return place
    return tensor.to(device)
