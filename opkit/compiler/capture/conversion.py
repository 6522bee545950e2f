"""This module converts an FX graph of AOTAutograd's to a :class:`Graph` without torch, and to the torch objects that it uses.

Nodes that compute sizes are left out: their users get the size itself, as an index over the symbols.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from opkit.compiler.capture import torch_private as private
from opkit.compiler.capture.constructors import devices_of, move_constructors
from opkit.compiler.capture.partitioner import has_effect
from opkit.compiler.capture.sizes import FLOAT_ARITHMETIC, SymbolicSizes
from opkit.compiler.ir.dtypes import OF_TORCH
from opkit.compiler.ir.graph import FloatType, Graph, Node, ObjectCall, OpaqueValue, Ref, TensorType, TypeName
from opkit.compiler.ir.index import Index, Symbol
from opkit.compiler.run.torch_operators import CONTROL_FLOW
from opkit.op import operator as operators

_FRAME = re.compile(r'File "([^"]*)", line (\d+), in .*\n\s*(.*)')
_OWN = str(Path(operators.__file__).parent)  # frames of opkit's own files are not the user's lines
_NUMBERS = (bool, int, float, complex, str)
_CPU = torch.device("cpu")


class Unsupported(Exception):
    """The compiler cannot compile a graph, so torch runs it. The message says why."""


class UnsupportedDevice(Unsupported):
    """A graph runs on a device that no code is made for, and neither do others there.

    Triton serves some of these devices too, such as Intel's GPUs; but opkit launches kernels by the drivers of CUDA and HIP.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(f"it runs on {device}, and code is made for CPUs, and for GPUs with CUDA or HIP")
        self.device = device.type


@dataclasses.dataclass(frozen=True)
class Captured:
    """A graph, and the torch objects that it uses.

    Attributes:
        graph: the graph.
        constants: its constant tensors, by node.
        targets: the functions that its operators are called by, by a node's target.
        opaques: the values of its :class:`OpaqueValue` arguments, by their text.
        computed: Python expressions of sizes that the runtime computes from others, by name.
        resolved: the numbers of the inputs that may come with other strides, conjugated or negated.
        bodies: the graphs that its control flow operators call, which are compiled too, by the text of their OpaqueValue.
        uncompiled: why torch runs parts of it that are graphs themselves.
        device: the device that it is compiled for: of its tensors that are not on the CPU, if there are any.
    """

    graph: Graph
    constants: dict[str, torch.Tensor]
    targets: dict[str, Callable[..., Any]]
    opaques: dict[str, Any]
    computed: dict[str, str]
    resolved: frozenset[int]
    bodies: dict[str, fx.GraphModule] = dataclasses.field(default_factory=dict[str, fx.GraphModule])
    uncompiled: tuple[str, ...] = ()
    device: torch.device = _CPU

    @property
    def key(self) -> str:
        """Text of everything that decides what the graph is compiled into."""
        atoms = {leaf for node in self.graph.nodes for leaf in _leaves(node.result)}
        sizes = sorted((a.name, a.least) for a in atoms if isinstance(a, Symbol))
        unnamed = dataclasses.replace(self.graph, name="")
        resolved = sorted(self.resolved)
        return repr((unnamed, sizes, sorted(self.computed.items()), resolved, sorted(self.opaques), str(self.device)))


def capture(
    module: fx.GraphModule, name: str, real_inputs: Sequence[Any] = (), fixed: int | None = None, is_body: bool = False
) -> Captured:
    """Convert a graph.

    Args:
        module: the graph.
        name: its name in messages.
        real_inputs: the inputs of its calls, if their layout differs from that of the traced inputs.
        fixed: as in ``Graph``.
        is_body: whether a control flow operator calls it, with inputs of any layout.

    Raises:
        Unsupported: it contains something that only torch can run: several devices apart from the CPU, or one that no code is
            made for, sparse tensors, symbolic floats as inputs or results, unknown dtypes.
    """
    move_constructors(module)
    return _Conversion(module, real_inputs, is_body).run(name, fixed)


class _Conversion:
    """The state of one conversion."""

    def __init__(self, module: fx.GraphModule, real_inputs: Sequence[Any], is_body: bool) -> None:
        self.module = module
        self.real_inputs = real_inputs
        self.is_body = is_body
        self.sizes = SymbolicSizes()
        self.constants: dict[str, torch.Tensor] = {}
        self.targets: dict[str, Callable[..., Any]] = {}
        self.opaques: dict[str, Any] = {}
        # FX nodes without a node in the graph, and the size or object that replaces each
        self.replaced: dict[fx.Node, Any] = {}
        self.resolved: set[int] = set()
        self.bodies: dict[str, fx.GraphModule] = {}
        self.uncompiled: list[str] = []
        self._types: dict[Any, TensorType] = {}
        self.device = device_of(module)
        self.numbers: set[fx.Node] = set()  # constants on the CPU that a graph for another device uses as numbers

    def run(self, name: str, fixed: int | None) -> Captured:
        nodes = list(self.module.graph.nodes)
        inputs = [self._input(number, node) for number, node in enumerate(n for n in nodes if n.op == "placeholder")]
        attributes = [converted for node in nodes if node.op == "get_attr" for converted in self._attribute(node)]
        calls = [converted for node in nodes if node.op == "call_function" for converted in self._call(node)]
        for node in nodes:
            if node.op in ("call_module", "call_method"):
                raise Unsupported(f"{node.name} is a {node.op}, which AOTAutograd leaves in no graph")
        outputs = tuple(self._output(each) for each in private.output_of(self.module.graph))
        graph = Graph(name, (*inputs, *attributes, *calls), outputs, self.sizes.values, fixed)
        computed = dict(self.sizes.computed)
        return Captured(
            graph, self.constants, self.targets, self.opaques, computed, frozenset(self.resolved), self.bodies,
            tuple(self.uncompiled), self.device,
        )  # fmt: skip

    # ---- nodes -------------------------------------------------------------------------------------------------------

    def _input(self, number: int, node: fx.Node) -> Node:
        value = node.meta.get("val")
        if (
            number < len(self.real_inputs)
            and isinstance(self.real_inputs[number], torch.Tensor)
            and isinstance(value, torch.Tensor)
        ):
            value = self.real_inputs[number]
        is_object = private.is_script_object(value) or private.is_ragged_size(value)
        result = OpaqueValue(f"input {node.name}") if is_object else self._result(value, node)
        tangent = node.name.startswith("tangents") and not node.name.startswith("tangents_token")  # which may be None
        if isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg() or tangent or self.is_body):
            self.resolved.add(number)  # autograd may pass such tensors to a backward, however it was traced
            self._refuse_writes(node)
        if isinstance(result, Index | OpaqueValue):
            self.replaced[node] = result
        return Node(node.name, "input", (), {}, result)

    def _refuse_writes(self, node: fx.Node) -> None:
        if any(user.target is torch.ops.aten.copy_.default and user.args[0] is node for user in node.users):
            raise Unsupported(f"{node.name} is written to, and may have to be copied before it is read")

    def _attribute(self, node: fx.Node) -> list[Node]:
        """Convert a constant tensor; a module (a branch of a condition, say) is an argument of a higher-order operator."""
        value = functools.reduce(getattr, str(node.target).split("."), self.module)
        if isinstance(value, fx.GraphModule):
            self._add_body(node, f"module {node.target}", value)
        if (
            not isinstance(value, torch.Tensor) or value.layout is not torch.strided
        ):  # only operators that are called can read it
            kind = "tensor" if isinstance(value, torch.Tensor) else "module"
            self.replaced[node] = self._opaque(f"{kind} {node.target}", value)
            return []
        if value.device != self.device and not value.shape and node not in private.output_of(self.module.graph):
            self.numbers.add(node)
            kind = self._tensor(value, node)
            return [
                Node(node.name, "aten.full.default", ([], private.number(value)), {"dtype": TypeName(kind.dtype)}, kind)
            ]
        self.constants[node.name] = value
        return [Node(node.name, "constant", (), {}, self._tensor(value, node))]

    def _add_body(self, node: fx.Node, text: str, value: fx.GraphModule) -> None:
        """Add a graph that nodes call to those that are compiled, if all its callers are control flow operators."""
        callers = [user for user in node.users if not _is_control_flow(user)]
        self.uncompiled += [f"{user.name} calls the graph {node.target}, and is not compiled" for user in callers]
        if not callers:
            self.bodies[text] = value

    def _call(self, node: fx.Node) -> list[Node]:
        value = node.meta.get("val")
        if "val" not in node.meta and node.users:
            raise Unsupported(f"{node.name} ({node.target}): its result has no metadata")
        if isinstance(value, torch.SymInt) or (type(value) is int and is_arithmetic(node.target)):
            self._refuse_data_dependent(node)
            if not is_arithmetic(node.target):
                raise Unsupported(f"{node.name}: a size that an operator computes ({node.target})")
            if private.is_ragged_size(value):
                raise Unsupported(f"{node.name} computes with the size of a nested tensor's rows ({node.target})")
            self.replaced[node] = self.sizes.index(value)
            return []
        if isinstance(value, torch.SymFloat):
            return self._float(node, value)
        if isinstance(value, torch.SymBool | bool) and is_arithmetic(node.target):
            return []  # a guard; any other use of it is refused
        if private.returns_object(node.target):
            self.replaced[node] = ObjectCall(self._target(node), tuple(self._argument(node.args)))
            return []
        if node.target in _SAME_VALUE and node.args[0] in self.numbers:
            self.numbers.add(node)
        target = self._target(node)
        arguments = self._argument(node.args)
        kwargs = {} if _is_control_flow(node) else node.kwargs  # the only possible one says that no input is written to
        named = {key: self._argument(each) for key, each in kwargs.items()}
        writes, result = tuple(map(self._reference, node.meta.get("writes", ()))), self._result(value, node)
        return [Node(node.name, target, tuple(arguments), named, result, origin(node), has_effect(node), writes)]

    def _float(self, node: fx.Node, value: torch.SymFloat) -> list[Node]:
        """Convert a float that may change; one that the IR has no arithmetic for becomes a number, with a guard."""
        target = FLOAT_ARITHMETIC.get(node.target)
        if target is None or not value.node.expr.free_symbols:  # or a guard has made it a number already
            self.replaced[node] = float(value)
            return []
        if target == "aten._local_scalar_dense.default" and self.device.type != "cpu":
            self._refuse_computed_number(node.args[0], node)
        return [Node(node.name, target, tuple(self._argument(node.args)), {}, FloatType(), origin(node))]

    def _refuse_computed_number(self, source: Any, node: fx.Node) -> None:
        """Refuse to read a number from the CPU's memory in a graph for a GPU, unless it is an input as Dynamo makes them."""
        value = source.meta["val"]
        if value.device.type != "cpu":
            return
        if source.op != "placeholder" or (value.dtype, value.dim()) != (torch.float64, 0):
            raise Unsupported(f"{node.name} reads a number from a tensor on the CPU ({source.name})")
        self._refuse_writes(source)

    def _refuse_data_dependent(self, node: fx.Node) -> None:
        if node.op == "call_function" and node.meta.get("unbacked_bindings"):
            raise Unsupported(f"{node.name}: a size that depends on the values in tensors ({node.target})")

    def _target(self, node: fx.Node) -> str:
        if node.target is operator.getitem:
            return "getitem"
        text = str(node.target) if private.is_overload(node.target) else f"opaque.{_name_of(node.target)}"
        control = CONTROL_FLOW[str(node.target)] if _is_control_flow(node) else node.target
        self.targets[text] = control  # pyright: ignore[reportArgumentType]
        return text

    # ---- types -------------------------------------------------------------------------------------------------------

    def _result(self, value: Any, node: fx.Node) -> Any:
        if isinstance(value, torch.Tensor):
            self._refuse_data_dependent(node)
            return self._tensor(value, node)
        if isinstance(value, list | tuple):
            return tuple(self._result(each, node) for each in value)
        if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
            return self.sizes.index(value)
        if value is None:
            return None
        raise Unsupported(f"{node.name} ({node.target}) is a {type(value).__name__}, which only torch computes with")

    def _tensor(self, value: torch.Tensor, node: fx.Node) -> TensorType:
        if value.layout is not torch.strided or private.is_wrapper_subclass(value):
            raise Unsupported(f"{node.name} ({node.target}) is no plain strided tensor")
        shape, strides, offset = tuple(value.shape), value.stride(), value.storage_offset()
        device = self.device.type if node in self.numbers else value.device.type
        key = (value.dtype, shape, strides, offset, device) if _plain(shape, strides, offset) else None
        found = None if key is None else self._types.get(key)
        if found is None:
            found = self._tensor_type(value, node, shape, strides, offset, device)
            if key is not None:
                self._types[key] = found
        return found

    def _tensor_type(
        self, value: torch.Tensor, node: fx.Node, shape: Any, strides: Any, offset: Any, device: str
    ) -> TensorType:
        dtype = OF_TORCH.get(_bare(value.dtype))
        if dtype is None:
            raise Unsupported(f"{node.name} ({node.target}) is of {value.dtype}")
        index, stride = self.sizes.index, self.sizes.stride
        return TensorType(dtype, tuple(map(index, shape)), tuple(map(stride, strides)), index(offset), device)

    # ---- arguments ---------------------------------------------------------------------------------------------------

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            found = self.replaced.get(argument)
            return self._reference(argument) if found is None else found
        if argument is None or type(argument) in _NUMBERS:
            return argument
        if isinstance(argument, list | tuple):
            return type(argument)(map(self._argument, argument)) if type(argument) is tuple else self._list(argument)
        if isinstance(argument, dict):
            return {key: self._argument(each) for key, each in argument.items()}
        if isinstance(argument, torch.SymInt):
            return self.sizes.index(argument)
        return self._by_name(argument)

    def _list(self, argument: Any) -> list[Any]:
        return [self._argument(each) for each in argument]

    def _output(self, output: Any) -> Any:
        found = self._argument(output)
        if isinstance(found, Ref) and isinstance(output.meta.get("val"), torch.SymFloat):
            raise Unsupported(f"it returns {output.name}, a float that is computed while the program runs")
        return found

    def _reference(self, node: fx.Node) -> Ref:
        if isinstance(node.meta.get("val"), torch.SymBool):
            raise Unsupported(f"{node.name} is a SymBool that is computed while the program runs")
        return Ref(node.name)

    def _by_name(self, argument: Any) -> TypeName | OpaqueValue:
        if isinstance(argument, torch.dtype) and _bare(argument) in OF_TORCH:
            return TypeName(OF_TORCH[_bare(argument)])
        if isinstance(argument, torch.dtype | torch.device | torch.layout | torch.memory_format):
            return self._opaque(str(argument), argument)
        return self._opaque(f"{type(argument).__name__} {_name_of(argument)}", argument)

    def _opaque(self, text: str, value: Any) -> OpaqueValue:
        known = self.opaques.setdefault(text, value)
        if known is not value and known != value:
            text = f"{text} {len(self.opaques)}"
            self.opaques[text] = value
        return OpaqueValue(text)


_SAME_VALUE = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default)


def device_of(module: fx.GraphModule) -> torch.device:
    """Return the device that a graph is compiled for.

    Raises:
        Unsupported: it uses several, or one that no code is made for.
    """
    found = devices_of(module)
    if len(found) > 1:
        raise Unsupported(f"it uses {' and '.join(sorted(map(str, found)))}, and a graph is compiled for one device")
    device = next(iter(found), _CPU)
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedDevice(device)
    return device


def _plain(shape: Any, strides: Any, offset: Any) -> bool:
    """Return whether all are numbers, so that the type can be cached: hashing a symbolic one would add a guard."""
    return all(type(n) is int for n in shape) and all(type(n) is int for n in strides) and type(offset) is int


@functools.cache
def _bare(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_arithmetic(target: Any) -> bool:
    """Return whether a node computes with sizes and not with tensors."""
    return not private.is_overload(target) or (target.namespace == "aten" and target._opname.startswith("sym_"))


def _is_control_flow(node: fx.Node) -> bool:
    """Return whether a node is a control flow operator whose bodies write to none of their inputs."""
    is_known = private.is_higher_order(node.target) and str(node.target) in CONTROL_FLOW
    return is_known and not node.kwargs.get("mutated_arg_indices")


def _name_of(value: Any) -> str:
    return getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or str(value)[:80]


def _leaves(result: Any) -> set[Any]:
    if isinstance(result, tuple):
        return {leaf for each in result for leaf in _leaves(each)}
    numbers = (*result.shape, *result.strides, result.offset) if isinstance(result, TensorType) else (result,)
    return {leaf for number in numbers if isinstance(number, Index) for leaf in number.leaves()}


def origin(node: fx.Node) -> str:
    """Return the user's line that a node comes from, or ""."""
    trace = node.meta.get("stack_trace")
    return "" if not trace else _last_line(trace)


@functools.lru_cache(maxsize=4096)
def _last_line(trace: str) -> str:
    """Return the user's line at the end of a stack trace, as "model.py:12: y = x + 1"."""
    start = trace.rfind('File "')
    found = _FRAME.match(trace, start) if start >= 0 else None
    while found is not None and found[1].startswith(_OWN):
        start = trace.rfind('File "', 0, start)
        found = _FRAME.match(trace, start) if start >= 0 else None
    return "" if found is None else f"{Path(found[1]).name}:{found[2]}: {found[3].strip()[:80]}"
