"""This module holds every private torch name that the compiler uses.

Read in torch 2.13.0; the same names are in torch 2.11 unless the line says otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch
import torch._guards
import torch.distributed as dist
from torch import fx
from torch._dynamo import config as _dynamo_config
from torch._dynamo import eval_frame as _eval_frame
from torch._dynamo.aot_compile_types import SerializableCallable as SerializableCallable
from torch._dynamo.backends.common import aot_autograd as aot_autograd
from torch._dynamo.utils import counters as _dynamo_counters
from torch._functorch import config as _functorch_config
from torch._functorch import partitioners as _partitioners
from torch._functorch._aot_autograd import graph_compile as _graph_compile
from torch._higher_order_ops import auto_functionalize as _functionalize
from torch._library.fake_class_registry import FakeScriptObject as _FakeScriptObject
from torch._logging._internal import log_state as _log_state
from torch._prims import rng_prims as _rng_prims
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.compiler import config as _compiler_config
from torch.fx.node import has_side_effect as _has_side_effect
from torch.utils import _python_dispatch
from torch.utils._sympy import functions as _sympy_functions
from torch.utils._sympy import symbol as _symbols
from torch.utils._sympy.printers import PythonPrinter as _PythonPrinter
from torch.utils._sympy.singleton_int import SingletonInt as _SingletonInt

from opkit.compiler.run.torch_private import builtin as builtin
from opkit.compiler.run.torch_private import is_overload as is_overload
from opkit.compiler.run.torch_private import is_torchs_own as is_torchs_own
from opkit.compiler.run.torch_private import no_autocast as no_autocast
from opkit.compiler.run.torch_private import out_variant as out_variant
from opkit.compiler.run.torch_private import overload_named as overload_named
from opkit.compiler.run.torch_private import overloads as overloads
from opkit.compiler.run.torch_private import qualified_name as qualified_name
from opkit.compiler.run.torch_private import schema as schema
from opkit.compiler.run.torch_private import tags as tags
from opkit.compiler.run.torch_private import without_modes as without_modes

sympy_functions = _sympy_functions
has_side_effect = _has_side_effect
sym_sqrt = torch._sym_sqrt  # pyright: ignore[reportAttributeAccessIssue]
min_cut_partition = _partitioners.min_cut_rematerialization_partition
run_and_save_rng_state = _rng_prims.run_and_save_rng_state
run_with_rng_state = _rng_prims.run_with_rng_state
functional_call = torch.ops.higher_order.auto_functionalized_v2
is_wrapper_subclass: Callable[[Any], bool] = _python_dispatch.is_traceable_wrapper_subclass

RECOMPILES_LOGGER = "torch._dynamo.guards.__recompiles"
"""The name of the logger in which Dynamo explains, at level DEBUG, why it compiles a function again."""


def log_recompiles() -> None:
    """Make Dynamo write to this logger."""
    _log_state.enable_artifact("recompiles")


def user_result_count() -> int | None:
    """Return how many of the first results of the forward graph that is being compiled are the user's.

    The others are saved for the backward graph, for which ``report_strides`` sets their strides.
    """
    context = torch._guards.TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    return None if metadata is None or context is None or context.output_strides is None else metadata.num_forward


def report_strides(strides: Iterable[tuple[int, ...] | None]) -> None:
    """Report to AOTAutograd the strides of a forward graph's results, without the tokens that order its effects."""
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        tokens = 0 if context.fw_metadata is None else len(context.fw_metadata.tokens)
        context.output_strides.extend([*strides][tokens:])


def disable_donated_buffers() -> None:
    """Clear the list of donated buffers, with which AOTAutograd refuses ``retain_graph=True``.

    No backward here writes into tensors that were saved for it.

    The list is that of the forward graph that is being compiled. Where there are tensors of subclasses, AOTAutograd has other
    metadata for the calls of the backward, with the same list.
    """
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None and context.fw_metadata.bw_donated_idxs is not None:
        context.fw_metadata.bw_donated_idxs.clear()


def fake_mode() -> Any:
    """Return the mode in which AOTAutograd traced the graph that is being compiled."""
    return torch._guards.detect_fake_mode()


def number(tensor: torch.Tensor) -> Any:
    """Return the number in a tensor of one element, also while a graph is traced (torch 2.11 to 2.14)."""
    with without_modes():
        return tensor.item()


def storage_address(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor begins; 0 for one without elements, and for a fake tensor another number."""
    storage = tensor.untyped_storage()
    return storage._cdata if isinstance(tensor, FakeTensor) else storage.data_ptr()


def is_saving() -> bool:
    """Return whether Dynamo needs a function that can be saved: ``torch.compile(...).aot_compile(...)`` was called."""
    return bool(getattr(_functorch_config, "bundled_autograd_cache", False))


def backwards_at_once(**settings: Any) -> contextlib.AbstractContextManager[None]:
    """Make AOTAutograd compile backwards together with their forwards, with other settings of its too."""
    return _functorch_config.patch(**settings, force_non_lazy_backward_lowering=True)


def without_autograd_cache() -> contextlib.AbstractContextManager[None]:
    """Prevent AOTAutograd from pickling its graphs, and make it compile backwards at once."""
    return backwards_at_once(bundled_autograd_cache=False, force_autograd_cache=False, strict_autograd_cache=False)


def expression(number: Any) -> Any:
    """Return the sympy expression of a symbolic integer, before replacements that were found later."""
    return number.node._expr


def replaced(number: Any) -> Any:
    """Return the sympy expression of a symbolic integer after the shape environment's replacements.

    An expression of sizes with the value 0 or 1 becomes that number, with a guard: the compiler must know whether a dimension is
    repeated or has no elements.
    """
    settled = number.node.expr
    if settled.is_Atom or not settled.free_symbols:
        return settled
    value = example_of(number)
    known = not any(_depends_on_data(symbol) for symbol in settled.free_symbols)
    if known and value in (0, 1) and number.node.shape_env.evaluate_expr(sympy.Eq(settled, value)):
        return sympy.Integer(value)
    return settled


def depends_on_float(expression: Any) -> bool:
    """Return whether the expression of a size contains a Python float that may change."""
    return any(_symbols.symbol_is_type(each, _symbols.SymT.FLOAT) for each in expression.free_symbols)


def _depends_on_data(symbol: Any) -> bool:
    return _symbols.symbol_is_type(symbol, _symbols.SymT.UNBACKED_INT)


def is_named_by_data(name: str) -> bool:
    """Return whether a symbol of this name stands for a size that depends on the values in tensors."""
    return name.startswith(_symbols.prefix_str[_symbols.SymT.UNBACKED_INT])


def symbol_of(number: Any) -> Any:
    """Return the symbol that a SymInt is, after replacements; None if it is none."""
    if not isinstance(number, torch.SymInt) or not number.node.is_symbolic() or is_ragged_size(number):
        return None
    settled = number.node.expr
    return settled if isinstance(settled, sympy.Symbol) else None


def symbols_in(value: Any) -> set[Any]:
    """Return the symbols in a SymInt, or in the sizes, strides and offset of a tensor, apart from floats."""
    sizes = (*value.shape, *value.stride(), value.storage_offset()) if isinstance(value, torch.Tensor) else (value,)
    symbolic = [each for each in sizes if isinstance(each, torch.SymInt) and each.node.is_symbolic()]
    found = [each.node.expr for each in symbolic if not is_ragged_size(each)]
    return {symbol for each in found if not depends_on_float(each) for symbol in each.free_symbols}


@contextlib.contextmanager
def floats_as_arguments() -> Iterator[None]:
    """Prevent AOTAutograd from making tensors of Python floats, and constants of those that it cannot make tensors of."""
    tensorify = _graph_compile.tensorify_python_scalars
    _graph_compile.tensorify_python_scalars = lambda *_: None
    try:
        yield
    finally:
        _graph_compile.tensorify_python_scalars = tensorify


def backwards_without_autocast() -> contextlib.AbstractContextManager[None]:
    """Make AOTAutograd trace backwards outside of their forwards' autocast, unless torch's setting names another one."""
    chosen = _functorch_config.backward_pass_autocast
    return _functorch_config.patch(backward_pass_autocast="off" if chosen == "same_as_forward" else chosen)


def example(symbol: Any, number: Any) -> int | None:
    """Return the value that a symbol had when the graph was captured; None for one that depends on data."""
    environment = number.node.shape_env
    known = getattr(environment, "backed_var_to_val", None)  # torch 2.12 and newer
    value = (environment.var_to_val if known is None else known).get(symbol)
    return None if value is None else int(value)


def is_ragged_size(number: Any) -> bool:
    """Return whether a SymInt is a nested int: the sizes of a nested tensor's rows, which are no number."""
    if not isinstance(number, torch.SymInt) or not number.node.is_symbolic():
        return isinstance(number, torch.SymInt) and number.node.is_nested_int()
    environment: Any = number.node.shape_env
    known = getattr(environment, "backed_var_to_val", None)  # torch 2.12 and newer
    values: Any = environment.var_to_val if known is None else known
    return any(isinstance(values.get(symbol), _SingletonInt) for symbol in number.node.expr.free_symbols)


def example_of(number: Any) -> int:
    """Return the value that an int or SymInt had when the graph was captured; 2 for one that depends on data."""
    if type(number) is int:
        return number
    expression = number.node.expr
    values = {symbol: example(symbol, number) for symbol in expression.free_symbols}
    return int(expression.xreplace({s: 2 if v is None else v for s, v in values.items()}))


def least(symbol: Any, number: Any) -> int:
    """Return the lower bound of a symbol, or a negative number if torch knows none."""
    known = number.node.shape_env.var_to_range.get(symbol)
    return int(known.lower) if known is not None and known.lower.is_Integer else -1


def python_text(expression: Any) -> str:
    """Return a sympy expression as Python text, in terms of ``math``, ``min``, ``max`` and the symbols' names."""
    return _PythonPrinter().doprint(expression)


def output_of(graph: fx.Graph) -> tuple[Any, ...]:
    """Return the results of an FX graph."""
    returned = graph.output_node().args[0]
    return tuple(returned) if isinstance(returned, list | tuple) else (returned,)


def is_higher_order(target: Any) -> bool:
    """Return whether the target of an FX node is an operator that calls graphs."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def written_arguments(op: Any, named: dict[str, Any], bases: Any) -> dict[str, Any]:
    """Take from the arguments of a ``functional_call`` those that it writes to, by name: views, lists of views, or None."""
    names, types = _functionalize.get_mutable_args(op)
    return _functionalize.read_view_information_from_args(names, types, named, bases)


def is_view(value: Any) -> bool:
    """Return whether a value describes a view of a tensor that a ``functional_call`` writes to."""
    return isinstance(value, _functionalize.ViewInfo)


def is_whole(view: Any) -> bool:
    """Return whether such a view is all of the tensor."""
    return isinstance(view, _functionalize.AliasViewInfo | _functionalize.NotView)


def layout_of(view: Any, base: torch.Tensor) -> tuple[Sequence[Any], Sequence[Any], Any]:
    """Return the sizes, strides and storage offset of such a view of a tensor."""
    if isinstance(view, _functionalize.AsStridedViewInfo):
        return view.size, view.stride, view.storage_offset
    found = view.regenerate_view([base])
    return found.shape, found.stride(), found.storage_offset()


def returns_object(target: Any) -> bool:
    """Return whether the target of an FX node is an operator that returns an object (torch 2.14: the process group of a mesh)."""
    return is_overload(target) and [str(each.type) for each in target._schema.returns] == ["PyObject"]


_OBJECTS = (torch.ScriptObject, _FakeScriptObject, *([dist.ProcessGroup] if dist.is_available() else []))


def is_script_object(value: Any) -> bool:
    """Return whether a value is one of those that operators take without torch's compilers looking into them.

    Device meshes, process groups and objects of ``torch.library.register_custom_class`` are such values.
    """
    return isinstance(value, _OBJECTS)


def watch_compilation(
    model: Callable[..., Any],
    backend: Callable[..., Any],
    guarded: Callable[[list[str]], None],
    recompiled: Callable[[str], None],
) -> Callable[..., Any]:
    """Compile a model, and report the guards of each graph, and why Dynamo compiles a function again."""

    def failed(failure: Any) -> None:
        recompiled(f"{failure.orig_code.co_name}: {failure.reason}")

    made: Any = _eval_frame.optimize(
        backend, guard_export_fn=lambda guards: guarded(_guards_text(guards)), guard_fail_fn=failed
    )
    return made(model)


def _guards_text(guards: Iterable[Any]) -> list[str]:
    """Return a line for each guard: its code if Dynamo has it, else its kind and its source."""
    lines: list[str] = []
    for guard in sorted(guards, key=lambda guard: guard.sort_key()):
        kind = f"{guard.create_fn_name()} {guard.name}".rstrip()
        codes = [code for code in guard.code_list or () if "_dynamo_" not in code]  # marks of Dynamo's own on tensors
        lines += [f"{kind}: {code}" for code in codes] or [kind]
    return list(dict.fromkeys(lines))


def graph_breaks() -> list[str]:
    """Return the reasons for graph breaks since Dynamo was reset."""
    return [str(reason).strip() for reason in _dynamo_counters["graph_break"]]


def reset() -> None:
    """Drop everything that Dynamo compiled, and its counters."""
    torch._dynamo.reset()
    _dynamo_counters.clear()


# ---- what AOTAutograd makes of Dynamo's graph, and what it depends on --------------------------------------------------

_OUTSIDE_GRAPHS = ("subclass_inp_meta", "subclass_fw_graph_out_meta", "subclass_tangent_meta")


def forward_metadata() -> Any:
    """AOTAutograd's ``ViewAndMutationMeta`` of the graph that is being compiled; None outside of it."""
    context = torch._guards.TracingContext.try_get()
    return None if context is None else context.fw_metadata


def output_kind(output: Any) -> str:
    """ "non_alias", "is_input" and the like, of an ``OutputAliasInfo``."""
    return output.output_type.name


def has_subclasses(metadata: Any) -> bool:
    """Return whether an input, output or gradient is a tensor of a subclass."""
    described = [each for name in _OUTSIDE_GRAPHS for each in getattr(metadata, name)]
    return any(type(each).__name__ not in ("PlainTensorMeta", "int") for each in described)


def functorch_settings() -> dict[str, Any]:
    """AOTAutograd's settings."""
    return _functorch_config.get_config_copy()  # pyright: ignore[reportAttributeAccessIssue]


def modes() -> int:
    """Return the number of active modes of ``__torch_function__`` and ``__torch_dispatch__``."""
    return torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()


def compiles_backwards() -> bool:
    """Return whether compiled autograd is on: it traces backward passes, and treats AOTAutograd's functions specially."""
    from torch._dynamo import compiled_autograd

    return bool(
        getattr(_dynamo_config, "compiled_autograd", False)
        or getattr(compiled_autograd, "compiled_autograd_enabled", False)
        or getattr(compiled_autograd, "in_compiled_autograd_region", False)
    )


def caches_disabled() -> bool:
    """Return whether the user disabled the caches of torch.compile."""
    return bool(getattr(_compiler_config, "force_disable_caches", False))


def cache_tag() -> str:
    """Return the text that the user adds to the keys of torch.compile's caches."""
    return str(getattr(_compiler_config, "cache_key_tag", ""))


def autocasts() -> bool:
    """Return whether autocast is on, for any device."""
    return torch._C._is_any_autocast_enabled()


set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Switch autograd's recording on or off."""


def copy_placeholder(node: fx.Node, copy: fx.Node) -> None:
    """Give the placeholder of a part of Dynamo's graph a node's type and source, which AOTAutograd reads."""
    copy.meta = {**node.meta}
    copy._dynamo_source = getattr(node, "_dynamo_source", None)  # pyright: ignore[reportAttributeAccessIssue]


def copy_sources(module: fx.GraphModule, part: fx.GraphModule) -> None:
    """Give a part of Dynamo's graph what AOTAutograd reads of the whole."""
    part.meta = {**module.meta}
    part._param_name_to_source = getattr(module, "_param_name_to_source", {})  # pyright: ignore[reportArgumentType]
