"""Which functions of PyTorch's OpInfo database are left out, and why; and what the check truly found in the others."""

from __future__ import annotations

_RANDOM = "draws random numbers"
_NO_TENSOR = "makes a tensor from numbers"
_UNSET = "returns memory that was never set"
_NO_OUTPUT = "returns no tensor"
_IN_PLACE = "writes to its argument"
_CUDA = "has kernels for GPUs alone"
_AMBIGUOUS = "has several right results"
_DATA = "its results' sizes follow from data, which its fake implementation refuses"

EXCLUDED: dict[str, str] = {
    **dict.fromkeys(
        (
            "cauchy", "exponential", "geometric", "log_normal", "normal", "uniform", "bernoulli", "multinomial", "randn",
            "randn_like", "rand_like", "randint", "randint_like", "nn.functional.dropout", "nn.functional.dropout2d",
            "nn.functional.dropout3d", "nn.functional.alpha_dropout", "nn.functional.feature_alpha_dropout",
            "nn.functional.rrelu", "nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d",
            "svd_lowrank", "pca_lowrank", "nn.functional.scaled_dot_product_attention", "torch.ops.aten._flash_attention_forward",
            "torch.ops.aten._efficient_attention_forward", "nn.functional.multi_head_attention_forward",
        ),
        _RANDOM,
    ),
    **dict.fromkeys(
        (
            "arange", "broadcast_shapes", "linspace", "logspace", "ones", "zeros", "full", "eye", "scalar_tensor", "triu_indices",
            "tril_indices", "signal.windows",
        ),
        _NO_TENSOR,
    ),
    **dict.fromkeys(("empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty_permuted"), _UNSET),
    **dict.fromkeys(("item", "allclose", "equal"), _NO_OUTPUT),
    **dict.fromkeys(("resize_", "resize_as_", "zero_"), _IN_PLACE),
    **dict.fromkeys(
        (
            "jiterator_unary", "jiterator_binary", "jiterator_4inputs_with_extra_args", "jiterator_binary_return_by_ref",
            "jiterator_2inputs_2outputs", "bmm.triton_optimized", "torch._scaled_mm", "torch._scaled_mm_v2",
        ),
        _CUDA,
    ),
    **dict.fromkeys(("_unsafe_masked_index", "_unsafe_masked_index_put_accumulate"), "trusts its caller's indices"),
    "_softmax_backward_data": "takes the dtype of an argument as another argument",
    "lu_unpack": "trusts its caller's pivots",
    **dict.fromkeys(("to_sparse", "sparse", "_segment_reduce"), "sparse tensors"),
}  # fmt: skip
"""Names, or the first parts of names, with the reason."""

FIXED: frozenset[str] = frozenset(
    {"native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "nn.functional.ctc_loss"}
)
"""Functions that trust their caller's sizes: the sample's are kept."""

UNLIKE: frozenset[str] = frozenset(
    {
        "index_copy", "index_put", "scatter", "put", "index_fill", "nn.functional.max_unpool1d", "nn.functional.max_unpool2d",
        "nn.functional.max_unpool3d", "nn.functional.max_unpool1d.grad", "nn.functional.max_unpool2d.grad",
        "nn.functional.max_unpool3d.grad", "max_pool2d_with_indices_backward",
    }
)  # fmt: skip
"""Functions whose indices must differ from one another: the sample's are kept."""

_SPECIALISES = "composite in Python: it loops over a size"
_LOOKS = "its fake implementation asks for an element, and raises"
_ALIKE = "torch documents that its backward needs src and index of one shape"

FINDINGS: dict[tuple[str, str], str] = {
    ("combinations", "fake.symbolic"): _SPECIALISES,
    ("corrcoef", "fake.accepts"): _LOOKS,
    ("cov", "fake.accepts"): _LOOKS,
    (
        "diagonal_scatter",
        "layout.expanded",
    ): "its result overlaps itself where its argument does: what is written shows twice",
    (
        "logaddexp2",
        "fake.strides",
    ): "the kernel and the decomposition order the dimensions of an expanded argument differently",
    ("scatter_add", "gradients.accepts"): _ALIKE,
}
"""What the check found in functions of ATen's, looked into one by one: (function, property) with the reason."""
