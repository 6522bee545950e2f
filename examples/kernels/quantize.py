"""Rows in 8 bits and back, in Triton: int8 and float8 (e4m3) with one scale for each row.

``scale = max(|row|) / largest`` and ``q = round(row / scale)``, where the largest number is 127 or 448. A row stays in
registers between its maximum and its rounding, so each element is read and written once: 3 bytes for bfloat16 in and
8 bits out, and the same back. 33.5 million elements (8192 x 4096) take 23 us at 4.3 TB/s.

Rounding is to the nearest, ties to even, as ``torch.round`` and torch's casts do it, bit for bit. Integers come of adding
``1.5 * 2**23``, after which a float's low bits are the integer. GPUs from sm_89 on round to float8 by themselves;
elsewhere it is done on the bits of float32. Float8 becomes wide by way of float16, whose exponents begin 8 lower::

    python examples/kernels/quantize.py

Source: Dettmers et al., "LLM.int8()", 2022, https://arxiv.org/abs/2208.07339 (scales for rows); Micikevicius et al., "FP8
Formats for Deep Learning", 2022, https://arxiv.org/abs/2209.05433 (e4m3).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Shaped
from torch import Tensor

import opkit

LOW = [torch.float32, torch.bfloat16, torch.float16]
"""The dtypes of the kernels, which compute in float32."""

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest number of each format."""

_SMALLEST = 1e-12  # of a row's maximum: a row of zeros has a scale too, and stays zero
SMALLEST, INTEGERS = tl.constexpr(_SMALLEST), tl.constexpr(1.5 * 2**23)
NORMAL, SUBNORMALS = (
    tl.constexpr(2.0**-6),
    tl.constexpr(2.0**14),
)  # of e4m3: its smallest normal number; 2**23 steps of 2**-9


def _scaled(x: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    wide = x.float()
    most = wide.abs().amax(-1).clamp_min(_SMALLEST)
    inverse = torch.full_like(most, largest) / most  # a number over a tensor is rounded twice
    return wide * inverse.unsqueeze(-1), most * (1 / largest)


# ---- the operators --------------------------------------------------------------------------------------------------


@opkit.custom_op("kernels::quantize_int8")
def quantize_int8(x: Float[Tensor, "*batch d"]) -> tuple[Shaped[Tensor, "*batch d"], Float[Tensor, "*batch"]]:
    """Each row in integers from -127 to 127, and what they are to be multiplied with.

    Args:
        x: ``(*batch, d)``, any floating dtype, finite; computed in float32. ``d`` is at least 1.

    Returns:
        ``(*batch, d)`` in int8, and ``(*batch,)`` in float32: a row's largest absolute value, or 1e-12, over 127.
    """
    scaled, scales = _scaled(x, LARGEST[torch.int8])
    return scaled.round().to(torch.int8), scales


@opkit.custom_op("kernels::quantize_fp8")
def quantize_fp8(x: Float[Tensor, "*batch d"]) -> tuple[Shaped[Tensor, "*batch d"], Float[Tensor, "*batch"]]:
    """Each row in float8 (e4m3) from -448 to 448, and what it is to be multiplied with.

    Args:
        x: ``(*batch, d)``, any floating dtype, finite; computed in float32. ``d`` is at least 1.

    Returns:
        ``(*batch, d)`` in ``torch.float8_e4m3fn``, and ``(*batch,)`` in float32: a row's largest absolute value, or
        1e-12, over 448.
    """
    scaled, scales = _scaled(x, LARGEST[torch.float8_e4m3fn])
    return scaled.to(torch.float8_e4m3fn), scales


@opkit.custom_op("kernels::dequantize")
def dequantize(
    q: Shaped[Tensor, "*batch d"], scales: Float[Tensor, "*batch"], dtype: torch.dtype = torch.bfloat16
) -> Float[Tensor, "*batch d"]:
    """Each row times its scale.

    Args:
        q: ``(*batch, d)``, int8 or ``torch.float8_e4m3fn``.
        scales: ``(*batch,)``, float32.
        dtype: of the result: bfloat16, float16 or float32.

    Returns:
        ``(*batch, d)`` in ``dtype``; computed in float32.
    """
    return (q.float() * scales.unsqueeze(-1)).to(dtype)


# ---- the kernels ----------------------------------------------------------------------------------------------------


@triton.jit
def _to_e4m3(x, HARDWARE: tl.constexpr):
    """Bits of e4m3. ``x`` is within its range."""
    if HARDWARE:
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits, magnitude = x.to(tl.int32, bitcast=True), tl.abs(x)
        whole = magnitude.to(tl.int32, bitcast=True)
        normal = ((whole + 0x7FFFF + ((whole >> 20) & 1)) >> 20) - (
            120 << 3
        )  # 3 bits remain; exponents begin 120 later
        small = (magnitude + SUBNORMALS).to(tl.int32, bitcast=True) & 15
        code = (tl.where(magnitude < NORMAL, small, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)
    return code


@triton.jit
def _from_e4m3(bits):
    """2**-8 times the numbers of which these are the bits."""
    wide = bits.to(tl.int16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), half.to(tl.float32))


@triton.jit
def _store_quantized(q, x, inside, FLOAT8: tl.constexpr, HARDWARE: tl.constexpr):
    if FLOAT8:
        tl.store(q.to(tl.pointer_type(tl.uint8), bitcast=True), _to_e4m3(x, HARDWARE), mask=inside)
    else:
        tl.store(q, (x + INTEGERS).to(tl.int32, bitcast=True).to(tl.int8), mask=inside)


@triton.jit
def _load(x, row, column, x_stride_m2, batch, d):
    inside = (row < batch)[:, None] & (column < d)[None, :]
    at = x + row[:, None] * x_stride_m2 + column[None, :]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32), inside


# A program takes ROWS rows; where one is longer than BLOCK, it is read a second time, from the cache as far as that goes.
@triton.jit
def _quantize(
    x, q, scales, x_stride_m2, batch, d, LARGEST: tl.constexpr, FLOAT8: tl.constexpr, HARDWARE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    values, inside = _load(x, row, column, x_stride_m2, batch, d)
    most = tl.max(tl.abs(values), 1)
    if not WHOLE:
        for start in range(BLOCK, d, BLOCK):
            values, inside = _load(x, row, start + column, x_stride_m2, batch, d)
            most = tl.maximum(most, tl.max(tl.abs(values), 1))
    most = tl.maximum(most, SMALLEST)
    tl.store(scales + row, most * (1 / LARGEST), mask=row < batch)
    inverse = tl.div_rn(tl.full((ROWS,), LARGEST, tl.float32), most)[:, None]
    if WHOLE:
        at = q + row[:, None] * d + column[None, :]
        _store_quantized(at, values * inverse, inside, FLOAT8, HARDWARE)
    else:
        for start in range(0, d, BLOCK):
            values, inside = _load(x, row, start + column, x_stride_m2, batch, d)
            at = q + row[:, None] * d + (start + column)[None, :]
            _store_quantized(at, values * inverse, inside, FLOAT8, HARDWARE)


@triton.jit
def _dequantize(
    q, scales, out, q_stride_m2, batch, d, ON_BITS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    across = tl.cdiv(d, BLOCK)
    program = tl.program_id(0)
    row = program // across * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    column = program % across * BLOCK + tl.arange(0, BLOCK)
    inside = (row < batch)[:, None] & (column < d)[None, :]
    at = q + row[:, None] * q_stride_m2 + column[None, :]
    scale = tl.load(scales + row, mask=row < batch, other=0.0)[:, None]
    if ON_BITS:
        at = at.to(tl.pointer_type(tl.uint8), bitcast=True)
    narrow = tl.load(at, mask=inside)
    wide = _from_e4m3(narrow) * (scale * 256) if ON_BITS else narrow.to(tl.float32) * scale
    tl.store(out + row[:, None] * d + column[None, :], wide, mask=inside)


# ---- how they are launched ------------------------------------------------------------------------------------------

LEAST, LONGEST = 4096, 16384  # elements of a tile
SHAPES = [(8192, 4096), (8192, 14336), (131072, 128)]
DEQUANTIZING = [{"TILE": tile, "num_warps": warps} for tile, warps in ((1024, 4), (2048, 8), (2048, 4), (4096, 8))]
CONVERTING = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
"""The GPUs that have instructions between float8 and others."""

TYPES = {"supported_fp8_dtypes": ("fp8e4nv", "fp8e5", "fp8e4b15")}
"""For kernels that only see the bits of float8, which Triton otherwise refuses on GPUs without such instructions."""


def _power(size: int) -> int:
    return triton.next_power_of_2(max(size, 1))


def _share(d: int, num_warps: int) -> int:
    """How many elements each thread has."""
    return max(min(_power(d), LONGEST), LEAST) // (32 * num_warps)


def _converts(x: Tensor) -> bool:
    return x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device) >= (8, 9)


def _quantizer(dtype: torch.dtype, **options: Any):
    return opkit.triton_kernel(
        _quantize,
        grid=lambda batch, ROWS: triton.cdiv(batch, ROWS),
        LARGEST=LARGEST[dtype],
        FLOAT8=dtype != torch.int8,
        ROWS=lambda BLOCK: max(LEAST // BLOCK, 1),
        BLOCK=lambda d: min(_power(d), LONGEST),
        WHOLE=lambda d: d <= LONGEST,
        configs=[{"num_warps": warps} for warps in (4, 8, 16)],
        prune=lambda configs, d: [c for c in configs if 16 <= _share(d, **c) <= 64],
        enable_fp_fusion=False,  # a product is rounded before it is rounded to an integer, as in torch
        outputs=("q", "scales"),
        examples=[{"x": f"bf16[{rows}, {d}]"} for rows, d in SHAPES],
        **options,
    )


def _dequantizer(kind: str, **options: Any):
    return opkit.triton_kernel(
        _dequantize,
        grid=lambda batch, d, TILE, BLOCK: triton.cdiv(batch, TILE // BLOCK) * triton.cdiv(d, BLOCK),
        BLOCK=lambda d, TILE: min(_power(d), TILE),
        configs=DEQUANTIZING,
        examples=[{"q": f"{kind}[{rows}, {d}]", "scales": f"fp32[{rows}]", "dtype": "bf16"} for rows, d in SHAPES],
        **options,
    )


def _quantizes(x: Tensor) -> bool:
    return x.shape[-1] > 0 and x.dtype in LOW


def _dequantizes(dtype: torch.dtype, q: Tensor, scales: Tensor) -> bool:
    return q.dtype == dtype and scales.dtype == torch.float32


FLOAT8 = torch.float8_e4m3fn
quantize_int8.register_kernel("cuda", _quantizer(torch.int8, HARDWARE=False), when=_quantizes)
quantize_fp8.register_kernel("cuda", _quantizer(FLOAT8, HARDWARE=False, **TYPES), when=_quantizes, name="on_bits")
quantize_fp8.register_kernel(
    "cuda",
    _quantizer(FLOAT8, HARDWARE=True, targets=CONVERTING),
    when=lambda x: _quantizes(x) and _converts(x),
    priority=1,
    name="in_hardware",
)
dequantize.register_kernel(
    "cuda", _dequantizer("i8", ON_BITS=False), when=lambda q, scales: _dequantizes(torch.int8, q, scales), name="int8"
)
dequantize.register_kernel(
    "cuda",
    _dequantizer("fp8e4m3", ON_BITS=True, **TYPES),
    when=lambda q, scales: _dequantizes(FLOAT8, q, scales),
    name="fp8_on_bits",
)
dequantize.register_kernel(
    "cuda",
    _dequantizer("fp8e4m3", ON_BITS=False, targets=CONVERTING),
    when=lambda q, scales: _dequantizes(FLOAT8, q, scales) and _converts(q),
    priority=1,
    name="fp8_in_hardware",
)


def main() -> None:
    """What comes back differs by half a step at most, or by a sixteenth of a number in float8."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(100, 1000, device=device) * torch.logspace(-3, 3, 100, device=device)[:, None]
    q, scales = quantize_int8(x)
    assert q.dtype == torch.int8
    assert (dequantize(q, scales, torch.float32) - x).abs().le(0.501 * scales[:, None]).all()
    q, scales = quantize_fp8(x)
    step = torch.maximum(x.abs() / 16, scales[:, None] * 2**-10)
    assert (dequantize(q, scales, torch.float32) - x).abs().le(1.001 * step).all()


if __name__ == "__main__":
    main()
