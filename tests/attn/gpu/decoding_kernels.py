"""The operators with the decoding kernels, for the interpreter's process: there they run on the CPU."""

import os

import numpy as np
from torch import Tensor

import opkit
from opkit.attn.gpu.decode import decoding
from opkit.attn.merging import merge_attention_operator
from opkit.attn.operator import attention_operator
from opkit.attn.paged.api import append_kv_operator, paged_attention_operator

attention = attention_operator()
paged_attention = paged_attention_operator()
append_kv = append_kv_operator()
merge_attention = merge_attention_operator()


@opkit.custom_op("decoding_tests::latent", mutates_args=(), inline=False)
def latent(q: Tensor, k: Tensor, columns: int) -> Tensor:
    """Attention whose values are the first columns of the keys."""
    arguments = (q, k, k[..., :columns], [], [], None, None, [], [], 0.1, 0.0, 0.0, False)
    with opkit.use_kernel(attention, decoding.NAME):
        return attention(*arguments)[0]


@opkit.custom_op("decoding_tests::latent_pages", mutates_args=(), inline=False)
def latent_pages(q: Tensor, pages: Tensor, columns: int, table: Tensor, lengths: Tensor, starts: Tensor) -> Tensor:
    """Paged attention whose values are the first columns of the keys."""
    rest = (table, lengths, starts, -(2**62), 0, 0.25, 0.0, None, None, None, [], [], [], [])
    with opkit.use_kernel(paged_attention, decoding.NAME):
        return paged_attention(q, pages, pages[..., :columns], *rest)[0]


def sum_products_in_float64():
    """Have the interpreter's products summed in float64 and then rounded.

    They are numpy's: in float32 the last bits of a row depend, with some BLAS, on where it lies in the product.
    """
    from triton.language import float64
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_dot = InterpreterBuilder.create_dot

    def summed(self, a, b, d, *how):
        found = create_dot(self, a, b, TensorHandle(d.data.astype(np.float64), float64), *how)
        return TensorHandle(found.data.astype(d.data.dtype), d.dtype.scalar)

    InterpreterBuilder.create_dot = summed


if os.environ.get("TRITON_INTERPRET") == "1":
    sum_products_in_float64()
    latent.register_kernel("cpu", latent.reference, name="interpreted")
    latent_pages.register_kernel("cpu", latent_pages.reference, name="interpreted")
