"""Launches of the kernel that writes keys and values to pages, :mod:`opkit.attn.gpu.decode.device.append`."""

from __future__ import annotations

import functools
from typing import Any

from opkit.kernels.triton.named import Named
from opkit.op.triton.declare import triton_kernel
from opkit.op.triton.kernel import TritonKernel

_APPEND = Named("opkit.attn.gpu.decode.device.append", "append")


@functools.cache
def kernel(k_scaled: bool, v_scaled: bool, constants: tuple[tuple[str, Any], ...]) -> TritonKernel:
    """The kernel for a set of constants."""
    bound = {"batch": "lengths_size_0", "kv_heads": "k_size_1", "pages": "k_pages_size_0", "width": "table_size_1"}
    bound |= {"table_b": "table_stride_0"}
    bound |= {f"{x}_{d}": f"{x}_stride_{n}" for x in "kv" for n, d in enumerate("th")}
    bound |= {f"{x}p_{d}": f"{x}_pages_stride_{n}" for x in "kv" for n, d in enumerate("bth")}
    unused: dict[str, Any] = {"K_SCALED": k_scaled, "V_SCALED": v_scaled}
    for x, scaled in (("k", k_scaled), ("v", v_scaled)):
        strides = {f"{x}s_{d}": f"{x}_scale_stride_{n}" for n, d in enumerate("bth")}
        bound |= strides if scaled else {}
        unused |= {} if scaled else dict.fromkeys(strides, 0)
    return triton_kernel(_APPEND, grid=_programs, bind=bound, num_warps=1, **dict(constants), **unused)


def _programs(programs: int) -> int:
    return programs
