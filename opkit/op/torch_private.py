"""Every private torch name that the operator layer relies on; those about torch.compile are in ``torch_compile``.

The names are those of torch 2.13.0. torch 2.11 has them too unless the line says otherwise. Other modules use public names
directly.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportAttributeAccessIssue=false, reportUnknownArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import _C
from torch._C._dynamo import eval_frame as _eval_frame
from torch._library import custom_ops as custom_ops
from torch._library import utils as library_utils
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch._subclasses.functional_tensor import FunctionalTensorMode as FunctionalTensorMode
from torch.autograd import forward_ad as forward_ad
from torch.autograd import function as autograd_function

from opkit.kernels.bridge import TorchPaths

F = TypeVar("F", bound=Callable[..., Any])

CustomOpDef = custom_ops.CustomOpDef
SingleLevelFunction = autograd_function._SingleLevelFunction
compiled_autograd_key: Callable[[Any], tuple[Any, ...]] = autograd_function.Function._compiled_autograd_key
DispatchKey = _C.DispatchKey
DispatchKeySet = _C.DispatchKeySet
AutoDispatchBelowAutograd = _C._AutoDispatchBelowAutograd

after_autograd_keyset: Any = _C._after_autograd_keyset
after_inplace_or_view_keyset: Any = _C._after_ADInplaceOrView_keyset
any_requires_grad: Callable[..., bool] = _C._any_requires_grad
shares_memory: Callable[[torch.Tensor, torch.Tensor], bool] = _C._is_alias_of
dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
function_modes: Callable[[], int] = _C._len_torch_function_stack
functorch_level: Callable[[], Any] = _C._functorch.peek_interpreter_stack
any_autocast: Callable[[], bool] = _C._is_any_autocast_enabled
jit_tracing: Callable[[], bool] = _C._is_tracing
is_excluded, set_excluded = _C._dispatch_tls_is_dispatch_key_excluded, _C._dispatch_tls_set_dispatch_key_excluded
profiling: Callable[[], bool] = _C._autograd._profiler_enabled
grad_enabled: Callable[[], bool] = torch.is_grad_enabled
deterministic: Callable[[], bool] = _C._get_deterministic_algorithms
fills_if_deterministic: Callable[[], bool] = _C._get_deterministic_fill_uninitialized_memory
parse_schema: Callable[[str], Any] = _C.parse_schema
current_gpu: Callable[[], int] = getattr(_C, "_cuda_getDevice", torch.cuda.current_device)
_stream_of: Callable[[int], int] | None = getattr(_C, "_cuda_getCurrentRawStream", None)  # missing without CUDA
capturing: Callable[[], bool] = getattr(_C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)
tensors_of_handles: Callable[[list[Any]], list[torch.Tensor]] = _C._aoti.alloc_tensors_by_stealing_from_void_ptrs
throw_on_data_pointer: Callable[[torch.Tensor], None] = _C._set_throw_on_mutable_data_ptr


def current_stream(gpu: int) -> int:
    """Return the handle of the current stream of a GPU; 0 for GPU -1, the CPU."""
    return 0 if gpu < 0 or _stream_of is None else _stream_of(gpu)


def builtin(overload: Any) -> Callable[..., Any]:
    """Return the compiled function behind an OpOverload, which calls the dispatcher, so that profilers record it."""
    return getattr(overload, "_cpp_dispatch_handle", overload._op)  # of torch 2.14, whose _op may bypass the dispatcher


def use_pyobj_dispatch(overload: Any, enabled: bool) -> None:
    """Set whether Python calls of an overload look its kernels up in Python, without converting arguments (torch 2.14 on).

    That is faster for kernels in Python and slower for compiled ones.
    """
    if hasattr(overload, "_enable_pyobj_dispatch"):
        overload._enable_pyobj_dispatch(enabled)


def dispatch_key_of(device_type: str) -> str:
    """Return the name of the backend dispatch key of a device type, "CPU" for "cpu"."""
    return _C._dispatch_key_for_device(device_type)


def tensor_guard(tensors: Any, strides: bool, sizes: bool = True) -> Callable[..., bool]:
    """Return a compiled test for tensors of the same types, dispatch keys, dtypes, devices, sizes and need of gradients.

    The dispatch keys include the thread's modes and exclusions at the time of each test. It refuses a tensor passed twice.
    """
    guards = _C._dynamo.guards.TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(t.shape) if sizes else [None] * t.ndim for t in tensors],
        dynamic_dims_strides=[list(t.stride()) if strides else [None] * t.ndim for t in tensors],
    )
    return guards.check


def autocast_keys() -> dict[str, Any]:
    """Return the dispatch key of autocast for each device type that supports it and that Python can name."""
    names = {device: f"Autocast{dispatch_key_of(device)}" for device in _C._autocast_supported_devices()}
    return {device: getattr(DispatchKey, name) for device, name in names.items() if hasattr(DispatchKey, name)}


def sizes_known(tensor: Any) -> bool:
    """Return whether every size of ``tensor`` is a number, none a symbol."""
    return all(type(size) is int for size in tensor.shape)


def sizes_depend_on_data(tensor: Any) -> bool:
    """Return whether a size or stride of ``tensor`` is an unbacked symbol, unknown until the program runs."""
    if all(type(number) is int for number in (*tensor.shape, *tensor.stride())):
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols((*tensor.shape, *tensor.stride())))


def or_false(condition: Any) -> bool:
    """Evaluate a comparison of sizes; False where it depends on data, so that tracing cannot decide it."""
    if condition is True or condition is False:
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def is_known_true(condition: Any) -> bool:
    """Return whether a comparison of sizes holds for all of them; no guard is added."""
    if condition is True or condition is False:
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def or_true(condition: Any) -> bool:
    """Evaluate a comparison of sizes; True where it depends on data, so that tracing cannot decide it."""
    if condition is True or condition is False:
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return guard_or_true(condition)


def contiguous(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is contiguous; False where that depends on data."""
    if not sizes_depend_on_data(tensor):
        return tensor.is_contiguous()
    from torch._prims_common import is_contiguous_or_false

    return is_contiguous_or_false(tensor)


def has_tangent(value: object) -> bool:
    """Return whether ``value`` is a tensor that carries a forward-mode tangent."""
    return isinstance(value, torch.Tensor) and unpack_dual(value)[1] is not None


def unpack_dual(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the primal and the tangent of a tensor at forward mode's one level, which Python may not know of (AOTAutograd)."""
    primal, tangent = forward_ad.unpack_dual(tensor, level=0)
    return primal, tangent


def make_dual(tensor: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    """Return the tensor with a tangent at forward mode's one level."""
    return forward_ad.make_dual(tensor, tangent, level=0)


def requiring_grad(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias of the tensor that is a leaf and requires grad, within transforms too."""
    from torch._functorch.eager_transforms import enable_inplace_requires_grad

    with enable_inplace_requires_grad(True):
        return tensor.view_as(tensor).requires_grad_()


def known_zero(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds only zeros; False within modes and transforms, where its values are not available."""
    return not dispatch_modes() and functorch_level() is None and not bool(torch.any(tensor != 0))


def recorded_below(args: Any, kwargs: Any) -> bool:
    """Return whether autograd or a transform around the current vmap differentiates with respect to an argument."""
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    functorch = _C._functorch
    inner = [functorch.get_unwrapped(t) if functorch.is_batchedtensor(t) else t for t in tensors]
    return any(t.requires_grad or functorch.is_functorch_wrapped_tensor(t) or has_tangent(t) for t in inner)


@contextlib.contextmanager
def single_level_functions_allowed() -> Generator[None]:
    """Allow a single-level autograd function inside a functorch transform, as torch's own rules do."""
    from torch._functorch.utils import enable_single_level_autograd_function

    with enable_single_level_autograd_function():
        yield


def forward_grad_enabled() -> Any:
    """Return a context in which forward-mode tangents are propagated, even if an outer one disables that."""
    return forward_ad._set_fwd_grad_enabled(True)


def _itself(value: Any) -> Any:
    return value


@contextlib.contextmanager
def no_modes() -> Generator[None]:
    """Suspend every dispatch mode (fake, proxy, functional, the user's own), and saved-tensor hooks."""
    from torch.utils._python_dispatch import _disable_current_modes

    hooks: Any = contextlib.nullcontext()
    if _C._autograd._saved_tensors_hooks_is_enabled():  # torch.func disables it
        hooks = torch.autograd.graph.saved_tensors_hooks(_itself, _itself)  # a checkpoint counts what is saved
    with _disable_current_modes(), hooks:
        yield


def current_modes() -> list[Any]:
    """Return the active dispatch modes, outermost first."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return list(_get_current_dispatch_mode_stack())


def batch_dims(args: Any) -> Any:
    """Return the dimension of each argument that the current functorch level maps over; None where it maps none."""
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
    from torch._functorch.vmap import unwrap_batched

    _, dims = unwrap_batched(args, retrieve_current_functorch_interpreter().level())
    return dims


def run_vmap_rule(rule: Callable[..., Any], op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a ``register_vmap`` style rule on arguments that are batched at the current functorch level."""
    from torch._functorch.autograd_function import custom_function_call_vmap_helper
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    interpreter: Any = retrieve_current_functorch_interpreter()
    return custom_function_call_vmap_helper(interpreter, rule, op, *args, **kwargs)


def untraced(function: F) -> F:
    """Keep Dynamo out of ``function`` and whatever it calls, at no cost a call.

    After a graph break Dynamo follows eager calls into every Python frame, the dispatcher's Python kernels included.
    """
    skip = _eval_frame._FrameAction.SKIP
    _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))
    return function


def register_ordered_effect(name: str, library: Any) -> None:
    """Declare that an operator has side effects, so that it is neither dropped nor reordered."""
    from torch._higher_order_ops import effects

    if hasattr(library, "_register_effectful_op"):  # torch 2.13
        from torch._library.effects import EffectType

        library._register_effectful_op(name, EffectType.ORDERED)
    else:
        effects._register_effectful_op(library_utils.lookup_op(name), effects._EffectType.ORDERED)


def tag_error(name: str, demand: str) -> Exception:
    """Return the error for an operator that breaks the promise of ``torch.Tag.inplace`` or ``torch.Tag.out``."""
    from opkit.errors import OutputError

    return OutputError(f"{name}: An operator tagged with torch.Tag.{demand}.")


def register_fake(library: Any, name: str, fake: Callable[..., Any], author: Any) -> None:
    """Register a fake implementation whose errors name the place where ``author`` is defined."""
    from torch._library.simple_registry import singleton

    library._register_fake(name.split("::")[1], fake)
    code = author.__code__
    registered: Any = singleton.find(name).fake_impl.kernel
    registered.source = f"{code.co_filename}:{code.co_firstlineno}"


def register_effect(name: str, effect: Any, library: Any) -> None:
    """``CustomOpDef.register_effect`` of torch 2.13."""
    if hasattr(library, "_register_effectful_op"):
        library._register_effectful_op(name, effect)
        return
    from torch._higher_order_ops import effects

    effects._register_effectful_op(library_utils.lookup_op(name), effect)


def in_fake_context(fake: Callable[..., Any], op: Any) -> Callable[..., Any]:
    """Wrap ``fake`` as torch runs a fake implementation: ``torch.library.get_ctx()`` works with the active fake mode."""
    from torch._library import fake_impl
    from torch._subclasses.fake_tensor import FakeTensorMode

    def call(*args: Any, **kwargs: Any) -> Any:
        mode = next(mode for mode in reversed(current_modes()) if isinstance(mode, FakeTensorMode))
        with fake_impl.set_ctx_getter(lambda: fake_impl.FakeImplCtx(mode, op)):
            return fake(*args, **kwargs)

    return call


@contextlib.contextmanager
def without_fake_tensor_logs() -> Generator[None]:
    """Suppress what torch logs in this thread about an operation that fails on fake tensors; the exception has it."""
    thread, logger = threading.get_ident(), logging.getLogger("torch._subclasses.fake_tensor")

    def of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(of_others)
    try:
        yield
    finally:
        logger.removeFilter(of_others)


@contextlib.contextmanager
def symbolic_tracing(mode: Any) -> Generator[None]:
    """Run operations under a fake mode of symbolic sizes as AOTAutograd does: in Python, where torch knows how."""
    from torch._dispatch.python import enable_python_dispatcher

    with without_fake_tensor_logs(), enable_python_dispatcher(), mode:
        yield


def fake_mode_of(args: Any, kwargs: Any) -> Any:
    """Return the fake mode of the fake tensors in a call, or the active one."""
    return torch._guards.detect_fake_mode(torch.utils._pytree.tree_leaves((args, kwargs)))


def clear_overridable_functions() -> None:
    """Clear torch's caches of overridable functions, which hold the functions of torch.nn.functional as they once were."""
    torch.overrides.get_testing_overrides.cache_clear()
    torch.overrides._get_overridable_functions.cache_clear()
    if (dynamo := sys.modules.get("torch._dynamo.variables.torch")) is not None:
        dynamo.get_overridable_functions.cache_clear()


# ---- torch.ops and torch.library ---------------------------------------------------------------------------------


def hidden_operator(name: str) -> Any:
    """Return an operator that ``torch.ops`` does not list, even after it is removed."""
    overload = library_utils.lookup_op(name)
    forget_operator(*name.split("::"))
    return overload


def forget_operator(namespace: str, name: str) -> None:
    """Remove an operator from the cache of ``torch.ops``, so that the next look-up goes to the dispatcher."""
    known = getattr(torch.ops, namespace)
    if name in vars(known):
        delattr(known, name)
        known._dir.remove(name)  # else the name outlives the operator's removal, and listing the namespace fails


def renew_packet(overload: Any) -> None:
    """Give the operator a new object in ``torch.ops``, with the same overload."""
    namespace, name = overload.namespace, overload._overloadpacket.__name__
    forget_operator(namespace, name)
    packet = getattr(getattr(torch.ops, namespace), name)
    setattr(packet, overload._overloadname, overload)
    overload._overloadpacket = packet


def destroy_library(library: torch.library.Library) -> None:
    """Remove what a library registered from PyTorch, so that nothing remains to do when it is garbage-collected.

    torch would remove the library's names again then, when other operators may have them.
    """
    from torch.fx.operator_schemas import _SCHEMA_TO_SIGNATURE_CACHE

    library._destroy()
    torch.library._defs.difference_update(library._op_defs)
    for qualname in library._op_defs:
        name, _, overload = qualname.partition(".")
        _SCHEMA_TO_SIGNATURE_CACHE.pop((name, overload), None)
    library._op_defs.clear()
    library._op_impls.clear()


def torch_paths() -> TorchPaths:
    """Return the version, headers and libraries of the running torch, for :mod:`opkit.kernels.bridge`."""
    folder = Path(torch.__file__).resolve().parent
    return TorchPaths(
        version=str(torch.__version__),
        git_version=str(torch.version.git_version),
        include_dir=folder / "include",
        library_dir=folder / "lib",
        cxx11_abi=torch.compiled_with_cxx11_abi(),
    )
