"""Constants of Triton's and Gluon's, named without importing either."""

import pytest
import triton
from triton.experimental.gluon import language as gl

from opkit.errors import KernelError
from opkit.kernels.triton import compiling, named


def test_a_layout_is_written_out_as_gluon_writes_it():
    fields = {"swizzle_byte_width": 128, "element_bitwidth": 16, "rank": 4}
    layout, own = named.Layout("NVMMASharedLayout", **fields), gl.NVMMASharedLayout(**fields)
    assert named.resolved(layout) == own
    for given in (layout, own):
        assert named.written_out(f"tensordesc<bf16[1, 64],{given!r}>") == f"tensordesc<bf16[1, 64],{own!r}>"
    assert layout == named.Layout("NVMMASharedLayout", **fields)
    assert layout != named.Layout("NVMMASharedLayout", **{**fields, "rank": 2})
    assert named.written_out("tensordesc<bf16[1, 64]>") == "tensordesc<bf16[1, 64]>"


def test_a_layout_that_gluon_does_not_have():
    with pytest.raises(KernelError, match=r"Gluon has no layout SharedMemory\(rank=4\)"):
        named.Layout("SharedMemory", rank=4).resolved()
    with pytest.raises(KernelError, match="AssertionError"):
        named.Layout("NVMMASharedLayout", swizzle_byte_width=7, element_bitwidth=16).resolved()


def test_element_types():
    assert named.resolved(named.Element("bfloat16")) is triton.language.bfloat16
    assert named.Element("bfloat16") != named.Element("float16")
    assert compiling.value_text(named.Element("bfloat16")) != compiling.value_text(named.Element("float16"))
