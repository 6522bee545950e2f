"""Which functions of PyTorch's OpInfo database are left out, and why; and what the check truly found in the others."""

from __future__ import annotations

_RANDOM = "draws random numbers"
_NO_TENSOR = "makes a tensor from numbers"
_UNSET = "returns memory that was never set"
_NO_OUTPUT = "returns no tensor"
_IN_PLACE = "writes to its argument"
_MEMORY = "is about memory, and not about what is in it"
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
    **dict.fromkeys(("resize_", "resize_as_", "zero_", "_batch_norm_with_update", "nn.functional.instance_norm"), _IN_PLACE),
    **dict.fromkeys(("as_strided", "as_strided_copy", "as_strided_scatter"), _MEMORY),
    **dict.fromkeys(
        (
            "jiterator_unary", "jiterator_binary", "jiterator_4inputs_with_extra_args", "jiterator_binary_return_by_ref",
            "jiterator_2inputs_2outputs", "bmm.triton_optimized", "torch._scaled_mm", "torch._scaled_mm_v2",
        ),
        _CUDA,
    ),
    **dict.fromkeys(("_unsafe_masked_index", "_unsafe_masked_index_put_accumulate"), "trusts its caller's indices"),
    "_softmax_backward_data": "takes the dtype of an argument as another argument",
    "nn.functional.linear_cross_entropy.chunked": "its autograd.Function has no setup_context: torch.func cannot go through it",
    "lu_unpack": "trusts its caller's pivots",
    **dict.fromkeys(("to_sparse", "sparse", "_segment_reduce"), "sparse tensors"),
}  # fmt: skip
"""Names, or the first parts of names, with the reason."""

FIXED: frozenset[str] = frozenset({"native_batch_norm", "_native_batch_norm_legit", "nn.functional.ctc_loss"})
"""Functions that trust their caller's sizes: the sample's are kept."""

UNLIKE: frozenset[str] = frozenset(
    {
        "index_copy", "index_put", "scatter", "put", "index_fill", "nn.functional.max_unpool1d", "nn.functional.max_unpool2d",
        "nn.functional.max_unpool3d", "nn.functional.max_unpool1d.grad", "nn.functional.max_unpool2d.grad",
        "nn.functional.max_unpool3d.grad", "max_pool2d_with_indices_backward",
    }
)  # fmt: skip
"""Functions whose indices must differ from one another: the sample's are kept."""

_SPECIALISES = "a composite that loops over a size, or compares two"
_LOOKS = "its fake implementation asks for an element, and raises"
_ALIKE = "torch documents that its backward needs src and index of one shape"

_SCATTERS = (
    "scatter", "scatter_add", "scatter_reduce.sum", "scatter_reduce.prod", "scatter_reduce.mean", "scatter_reduce.amax",
    "scatter_reduce.amin",
)  # fmt: skip
_REDUCTION = "with symbolic sizes a decomposition is run, which takes its reduction for another, or refuses it"
_NO_FAKE = "it has no meta kernel: ordinary fake tensors run the kernel itself, and symbolic sizes cannot"
_UNSET_SUM = "of no rows it returns memory that was never set"
_TRACED = "traced with symbolic sizes, its result has other strides"

_EMPTY = (
    "numbers.empty", "behaviour.deterministic", "behaviour.history", "behaviour.values", "behaviour.first", "behaviour.arguments",
    "memory.uninitialized", "numbers.reference", "schema.defaults", "layout.strides", "layout.views", "behaviour.settings",
)  # fmt: skip

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
    ("fft.ihfft2", "fake.symbolic"): _TRACED,
    ("fft.ihfftn", "fake.symbolic"): _TRACED,
    ("geqrf", "fake.symbolic"): _NO_FAKE,
    ("histogram", "fake.symbolic"): _NO_FAKE,
    **{(name, "fake.symbolic"): _SPECIALISES for name in ("hash_tensor", "kron", "linalg.multi_dot", "take_along_dim")},
    ("linalg.lstsq", "fake.accepts"): _DATA,
    (
        "linalg.eigvals",
        "numbers.extreme",
    ): "infinities end the process: MKL refuses them, and torch reads what was not written",
    ("nn.functional.embedding_bag", "memory.crash"): "indices and no offsets end the process",
    ("nn.functional.hinge_embedding_loss", "fake.symbolic"): _REDUCTION,
    ("nn.functional.margin_ranking_loss", "fake.symbolic"): _REDUCTION,
    ("nn.functional.nll_loss", "fake.symbolic"): _REDUCTION,
    ("nn.functional.one_hot", "fake.accepts"): _LOOKS,
    (
        "nn.functional.batch_norm",
        "fake.strides",
    ): "the result is contiguous, that of its meta kernel like the argument",
    **{("nn.functional.multi_margin_loss", name): _UNSET_SUM for name in _EMPTY},
    **{(name, "gradients.accepts"): _ALIKE for name in _SCATTERS},
}
"""What the check found in functions of ATen's, looked into one by one: (function, property) with the reason."""
