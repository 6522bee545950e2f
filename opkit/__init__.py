"""opkit: custom operators for PyTorch from one function.

An operator is one reference, any number of kernels, and rules: what the author leaves out is derived from the reference.
"""

import importlib
from typing import TYPE_CHECKING, Any

from opkit import errors as errors
from opkit import op as _op

__version__ = "0.1.0"


def _work_with_dtensors(op: Any) -> None:
    from opkit.sharding import activation

    activation.observe(op)


_op.observers.append(_work_with_dtensors)

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
    from opkit.contract import check as check
    from opkit.jax.api import to_jax as to_jax
    from opkit.kernels.aot_package import runtime_library as runtime_library
    from opkit.kernels.cc.native import c_kernel as c_kernel
    from opkit.kernels.cc.native import cpp_kernel as cpp_kernel
    from opkit.kernels.cc.native import cuda_kernel as cuda_kernel
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
    from opkit.op.definition import custom_op as custom_op
    from opkit.op.forcing import use_kernel as use_kernel
    from opkit.op.from_library import from_library as from_library
    from opkit.op.operator import CustomOp as CustomOp
    from opkit.op.registry import get as get
    from opkit.op.registry import operators as operators
    from opkit.op.registry import remove as remove
    from opkit.op.triton.declare import triton_kernel as triton_kernel
    from opkit.op.triton.kernel import tensor_descriptor as tensor_descriptor
    from opkit.ship.export import export as export
    from opkit.ship.load import LoadedModel as LoadedModel
    from opkit.ship.load import load as load

# Imported at their first use, so that `import opkit` and `opkit --help` import no torch.
_LAZY = {
    "CustomOp": ("opkit.op.operator", "CustomOp"),
    "LoadedModel": ("opkit.ship.load", "LoadedModel"),
    "aoti_compile_and_package": ("opkit.op.aot.inductor", "aoti_compile_and_package"),
    "append_kv": ("opkit.attn.paged.api", "append_kv"),
    "attention": ("opkit.attn.api", "attention"),
    "batch_invariant": ("opkit.attn.api", "batch_invariant"),
    "c_kernel": ("opkit.kernels.cc.native", "c_kernel"),
    "check": ("opkit.contract", "check"),
    "checkpoint": ("opkit.layers.checkpoints", "checkpoint"),
    "checkpoint_layers": ("opkit.layers.modules", "checkpoint_layers"),
    "checkpoint_name": ("opkit.layers.names", "checkpoint_name"),
    "compile_layers": ("opkit.layers.modules", "compile_layers"),
    "config": ("opkit.config", None),
    "context_parallel": ("opkit.attn.parallel.api", "context_parallel"),
    "cpp_kernel": ("opkit.kernels.cc.native", "cpp_kernel"),
    "cuda_kernel": ("opkit.kernels.cc.native", "cuda_kernel"),
    "custom_op": ("opkit.op.definition", "custom_op"),
    "explain": ("opkit.compiler.explain", "explain"),
    "export": ("opkit.ship.export", "export"),
    "fit": ("opkit.layers.fitting", "fit"),
    "from_library": ("opkit.op.from_library", "from_library"),
    "get": ("opkit.op.registry", "get"),
    "keep": ("opkit.layers.policies", "keep"),
    "load": ("opkit.ship.load", "load"),
    "load_ipython_extension": ("opkit.notebook", "load_ipython_extension"),
    "masks": ("opkit.masks", None),
    "merge_attention": ("opkit.attn.merging", "merge_attention"),
    "nn": ("opkit.nn", None),
    "offload": ("opkit.layers.policies", "offload"),
    "operators": ("opkit.op.registry", "operators"),
    "optimize": ("opkit.nn.optimize", "optimize"),
    "paged_attention": ("opkit.attn.paged.api", "paged_attention"),
    "register_transformers": ("opkit.attn.compat.hugging_face", "register_transformers"),
    "remove": ("opkit.op.registry", "remove"),
    "restore": ("opkit.nn.optimize", "restore"),
    "runtime_library": ("opkit.kernels.aot_package", "runtime_library"),
    "scan": ("opkit.layers.scan", "scan"),
    "scan_layers": ("opkit.layers.modules", "scan_layers"),
    "sdpa_override": ("opkit.attn.compat.sdpa", "sdpa_override"),
    "set_sdpa_override": ("opkit.attn.compat.sdpa", "set_sdpa_override"),
    "tensor_descriptor": ("opkit.op.triton.kernel", "tensor_descriptor"),
    "to_jax": ("opkit.jax.api", "to_jax"),
    "triton_kernel": ("opkit.op.triton.declare", "triton_kernel"),
    "use_kernel": ("opkit.op.forcing", "use_kernel"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'opkit' has no attribute {name!r}")
    module, member = _LAZY[name]
    imported = importlib.import_module(module)
    globals()[name] = imported if member is None else getattr(imported, member)
    return globals()[name]
