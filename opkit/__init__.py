"""opkit: custom operators for PyTorch from one function.

An operator is one reference, any number of kernels, and rules: what the author leaves out is derived from the reference.
"""

import importlib
from typing import TYPE_CHECKING, Any

from opkit import errors as errors
from opkit.contract import check as check
from opkit.kernels.aot_package import runtime_library as runtime_library
from opkit.kernels.cc.native import c_kernel as c_kernel
from opkit.kernels.cc.native import cpp_kernel as cpp_kernel
from opkit.kernels.cc.native import cuda_kernel as cuda_kernel
from opkit.op import registry as _registry
from opkit.op.definition import custom_op as custom_op
from opkit.op.forcing import use_kernel as use_kernel
from opkit.op.from_library import from_library as from_library
from opkit.op.operator import CustomOp as CustomOp
from opkit.op.registry import get as get
from opkit.op.registry import operators as operators
from opkit.op.registry import remove as remove
from opkit.op.triton.declare import triton_kernel as triton_kernel
from opkit.op.triton.kernel import tensor_descriptor as tensor_descriptor
from opkit.sharding import activation as _sharding

__version__ = "0.1.0"

_registry.observers.append(_sharding.observe)  # operators work with DTensors


if TYPE_CHECKING:
    from opkit import masks as masks
    from opkit import nn as nn
    from opkit.attn.api import attention as attention
    from opkit.attn.api import batch_invariant as batch_invariant
    from opkit.attn.compat.hugging_face import register_transformers as register_transformers
    from opkit.attn.compat.sdpa import sdpa_override as sdpa_override
    from opkit.attn.compat.sdpa import set_sdpa_override as set_sdpa_override
    from opkit.attn.merging import merge_attention as merge_attention
    from opkit.attn.paged.api import append_kv as append_kv
    from opkit.attn.paged.api import paged_attention as paged_attention
    from opkit.attn.parallel.api import context_parallel as context_parallel
    from opkit.compiler.explain import explain as explain
    from opkit.jax.api import to_jax as to_jax
    from opkit.layers.checkpoints import checkpoint as checkpoint
    from opkit.layers.fitting import fit as fit
    from opkit.layers.modules import checkpoint_layers as checkpoint_layers
    from opkit.layers.modules import compile_layers as compile_layers
    from opkit.layers.modules import scan_layers as scan_layers
    from opkit.layers.names import checkpoint_name as checkpoint_name
    from opkit.layers.policies import keep as keep
    from opkit.layers.policies import offload as offload
    from opkit.layers.scan import scan as scan
    from opkit.nn.optimize import optimize as optimize
    from opkit.nn.optimize import restore as restore
    from opkit.notebook import load_ipython_extension as load_ipython_extension
    from opkit.op.aot.inductor import aoti_compile_and_package as aoti_compile_and_package
    from opkit.ship.export import export as export
    from opkit.ship.load import LoadedModel as LoadedModel
    from opkit.ship.load import load as load

# Names that few users need, or that take long to import, as torch._dynamo does: imported at their first use.
_LAZY = {
    "LoadedModel": ("opkit.ship.load", "LoadedModel"),
    "aoti_compile_and_package": ("opkit.op.aot.inductor", "aoti_compile_and_package"),
    "append_kv": ("opkit.attn.paged.api", "append_kv"),
    "attention": ("opkit.attn.api", "attention"),
    "batch_invariant": ("opkit.attn.api", "batch_invariant"),
    "checkpoint": ("opkit.layers.checkpoints", "checkpoint"),
    "checkpoint_layers": ("opkit.layers.modules", "checkpoint_layers"),
    "checkpoint_name": ("opkit.layers.names", "checkpoint_name"),
    "compile_layers": ("opkit.layers.modules", "compile_layers"),
    "context_parallel": ("opkit.attn.parallel.api", "context_parallel"),
    "export": ("opkit.ship.export", "export"),
    "explain": ("opkit.compiler.explain", "explain"),
    "fit": ("opkit.layers.fitting", "fit"),
    "keep": ("opkit.layers.policies", "keep"),
    "load": ("opkit.ship.load", "load"),
    "load_ipython_extension": ("opkit.notebook", "load_ipython_extension"),
    "masks": ("opkit.masks", None),
    "merge_attention": ("opkit.attn.merging", "merge_attention"),
    "nn": ("opkit.nn", None),
    "offload": ("opkit.layers.policies", "offload"),
    "optimize": ("opkit.nn.optimize", "optimize"),
    "paged_attention": ("opkit.attn.paged.api", "paged_attention"),
    "register_transformers": ("opkit.attn.compat.hugging_face", "register_transformers"),
    "restore": ("opkit.nn.optimize", "restore"),
    "scan_layers": ("opkit.layers.modules", "scan_layers"),
    "scan": ("opkit.layers.scan", "scan"),
    "sdpa_override": ("opkit.attn.compat.sdpa", "sdpa_override"),
    "set_sdpa_override": ("opkit.attn.compat.sdpa", "set_sdpa_override"),
    "to_jax": ("opkit.jax.api", "to_jax"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'opkit' has no attribute {name!r}")
    module, member = _LAZY[name]
    imported = importlib.import_module(module)
    globals()[name] = imported if member is None else getattr(imported, member)
    return globals()[name]
