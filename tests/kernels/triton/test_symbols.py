"""Constants of Triton's and Gluon's, named without importing either."""

import pytest
import triton
from triton.experimental.gluon import language as gl

from opkit.errors import KernelError
from opkit.kernels.triton import compiling, symbols


def test_a_layout_is_written_out_as_gluon_writes_it():
    fields = {"swizzle_byte_width": 128, "element_bitwidth": 16, "rank": 4}
    layout, own = symbols.Layout("NVMMASharedLayout", **fields), gl.NVMMASharedLayout(**fields)
    assert symbols.resolved(layout) == own
    for given in (layout, own):
        assert symbols.written_out(f"tensordesc<bf16[1, 64],{given!r}>") == f"tensordesc<bf16[1, 64],{own!r}>"
    assert layout == symbols.Layout("NVMMASharedLayout", **fields)
    assert layout != symbols.Layout("NVMMASharedLayout", **{**fields, "rank": 2})
    assert symbols.written_out("tensordesc<bf16[1, 64]>") == "tensordesc<bf16[1, 64]>"


def test_a_layout_that_gluon_does_not_have():
    with pytest.raises(KernelError, match=r"Gluon has no layout SharedMemory\(rank=4\)"):
        symbols.Layout("SharedMemory", rank=4).resolved()
    with pytest.raises(KernelError, match="AssertionError"):
        symbols.Layout("NVMMASharedLayout", swizzle_byte_width=7, element_bitwidth=16).resolved()


def test_element_types():
    assert symbols.resolved(symbols.Element("bfloat16")) is triton.language.bfloat16
    assert symbols.Element("bfloat16") != symbols.Element("float16")
    assert compiling.value_text(symbols.Element("bfloat16")) != compiling.value_text(symbols.Element("float16"))
