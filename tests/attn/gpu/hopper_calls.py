"""What the tests of kernels for sm_90 share: calls, what the compiler says of them, and numbers beside the reference's."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton

from opkit.attn import reference
from opkit.attn.gpu.hopper import forward_cuda, library
from opkit.attn.masks import program
from opkit.errors import KernelError
from opkit.kernels.triton import compiling
from opkit.op.triton.building import request_for
from opkit.op.triton.launch import recording
from opkit.testing import compile_launches

FAR = program.UNLIMITED
CAUSAL = (program.BAND, -FAR, 0)
SHARED = 232448  # bytes that a block may have
BF16, FP16 = torch.bfloat16, torch.float16

on_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]

on_hopper_with_compiler = [*on_hopper, pytest.mark.skipif(not library.compiler_there(), reason="needs NVRTC or nvcc")]


def unlike(cases, holds):
    """The names of the calls of which something does not hold."""
    return [case for case, given in cases.items() if not holds(given())]


def refuses(function, said):
    """Whether a function refuses a call in these words."""

    def refused(given):
        try:
            function(*given)
        except KernelError as error:
            return re.search(said, str(error)) is not None
        return False

    return refused


def bottom_right(queries, keys):
    """A causal mask under which the last query sees the last key."""
    return program.BAND, -FAR, keys - queries


def arguments(
    *tensors, mask=(), masks=(), sinks=None, scale=None, softcap=0.0, bias=(), dropout_p=0.0, out_is_bshd=False
):
    scale = tensors[0].shape[3] ** -0.5 if scale is None else scale
    return (*tensors, list(masks), [], sinks, None, list(mask), list(bias), scale, softcap, dropout_p, out_is_bshd)


def shaped(heads, queries, keys, head, columns, dtype=BF16, device="meta", batch=2):
    """Tensors of a call without numbers; ``heads`` are those of queries and of keys."""
    sizes = (heads[0], queries, head), (heads[1], keys, head), (heads[1], keys, columns)
    return [torch.empty(batch, *size, dtype=dtype, device=device) for size in sizes]


def requested(given, run):
    with recording() as found:
        run(*given)
    return request_for(found[-1], None, "sm_90")


def assembled(request, folder):
    """What ptxas says of a kernel."""
    source = folder / "kernel.ptx"
    source.write_text(compiling.lowered(request).asm["ptx"])
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    command = [program, "-v", "--gpu-name=sm_90a", source, "-o", folder / "kernel.cubin"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def check_compiled(run, registers, folder, record_property, spilled=0):
    report = compile_launches(run, ["sm_90"])
    report.raise_for_failures()
    *_, row = report.rows
    record_property("resources", f"{row.registers} registers, {row.shared} bytes shared, {row.spills} bytes spilled")
    assert row.registers == registers
    assert row.spills <= spilled, row
    assert row.shared <= SHARED
    said = assembled(requested((), run), folder)
    assert re.findall(r"\((C75\d\d)\)", said) == [], said  # a product that waits for the one before it
    assert spilled or "0 bytes spill stores, 0 bytes spill loads" in said


def filled(batch, heads, queries, keys, head, columns, dtype=BF16, out_is_bshd=False):
    made = shaped(heads, queries, keys, head, columns, dtype, "cuda", batch)
    made = [x.transpose(1, 2).contiguous().transpose(1, 2) if out_is_bshd else x for x in made]
    return [x.normal_() for x in made]


def overflowing(head, device, queries=300, keys=300):
    """A call in float16 whose last keys, which are visited first, have logits of -4e8 to -1e9; those of the others are small.

    The greatest of them times a factor is rounded by up to 64, so that weights are up to 2^64: no float16, but a float32.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(x.shape, generator=generator) for x in shaped((2, 1), queries, keys, head, head, batch=1))
    q[..., 0] = 4e4 + 2e4 * torch.rand(q.shape[:3], generator=generator)
    k[..., 0] = 0
    k[..., keys - 90 :, 0] = -6e4 - torch.arange(90)
    return arguments(*(x.to(device, FP16) for x in (q, k, v)), scale=0.25)


def compared(given, found=None):
    """The kernel's results beside the reference's in float64; no row is further off than rounding p and the result explains."""
    out, lse = forward_cuda.forward(*given) if found is None else found
    exact = [x.double() if isinstance(x, torch.Tensor) else x for x in given]
    expected, of_rows = reference.attention(*exact)
    assert (out.transpose(1, 2) if given[-1] else out).is_contiguous()
    rounding = torch.finfo(out.dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=rounding, atol=1.5 * rounding, equal_nan=True)
    torch.testing.assert_close(lse.double(), of_rows, rtol=1e-5, atol=1e-4, equal_nan=True)
    return out, lse


def hide(k, v, places=(3, 150, 299)):
    """Make keys and values of some places NaN and infinite."""
    for j in places:
        k[:, :, j], v[:, :, j, ::3], v[:, :, j, 1] = float("nan"), float("inf"), float("nan")


def compared_where_hidden(given):
    """The results of a call whose hidden keys and values are not finite: they reach the rows that see them, and no others."""
    out, lse = forward_cuda.forward(*given)
    expected, of_rows = reference.attention(*[x.double() if isinstance(x, torch.Tensor) else x for x in given])
    clean = expected.isfinite().all(-1)
    assert 0 < clean.sum() < clean.numel()
    torch.testing.assert_close(out[clean].double(), expected[clean], rtol=1e-2, atol=1e-2)
    assert out[~clean].isnan().any(-1).all()
    torch.testing.assert_close(lse.double(), of_rows, rtol=1e-5, atol=1e-4, equal_nan=True)
