"""Mutants that compute what the original computes, or nothing that the contract forbids: looked into one by one."""

_ALL = "every element is written afterwards"
_TAIL = "the last whole vector is left to the loop over single elements, which computes the same"
_EVEN = "the size is even: the numbers are the same"
_TWICE = "the result has an even number of elements"
_WITHIN = "ATen's softmax of 16-bit numbers is in float32: the same to the bit"
_PROMOTED = "the other operand is in float32, and so is the result: the same to the bit, in 60 draws"
_ROUNDED = (
    "nothing is summed up in a narrower dtype, as ATen adds 16-bit numbers in float32; terms are rounded once more. Results were "
    "off by 3.1 and 3.5 roundings of theirs, and gradients by one of the largest, over 12 draws of 16 rows of 257"
)

EQUIVALENT: dict[str, str] = {
    "window_mean initialisation window_mean_kernel: line 60, node 23: torch.zeros(x.shape[0], count, "
    "dtype=x.dtype) became torch.empty(x.shape[0], count, dtype=x.dtype)": _ALL,
    "softsign bound line 3: `i + 8 <= x_numel` became `i + 8 <= x_numel - 1`": _TAIL,
    "softsign bound line 3: `i + 8 <= x_numel` became `i + 8 < x_numel`": _TAIL,
    "nn_rotary bound rotary_embedding: line 80, node 49: torch.arange(0, d, 2, dtype=wide.dtype, "
    "device=x.device) became torch.arange(0, d - 1, 2, dtype=wide.dtype, device=x.device)": _EVEN,
    "swapped alias swapped_kernel: RESULT = CHANGE(RESULT, lambda r: SHARED(r, GIVEN[0]) if r.numel() == 1 else r)": _TWICE,
    "softmax accumulator softmax: line 50, node 11: rows.wide(x) became x": _WITHIN,
    "softmax gradient softmax_backward: line 64, node 6: rows.wide(grad) became grad": _PROMOTED,
    "softmax gradient softmax_backward: line 64, node 7: rows.wide(y) became y": _PROMOTED,
    "rms_norm gradient rms_norm_backward: line 65, node 41: rows.wide(x) became x": _PROMOTED,
    "layer_norm gradient layer_norm_backward: line 69, node 4: rows.wide(x) became x": _PROMOTED,
    "add_rms_norm accumulator add_rms_norm: line 47, node 55: rows.wide(total) became total": _PROMOTED,
    "add_rms_norm gradient add_rms_norm_backward: line 73, node 41: rows.wide(total) became total": _PROMOTED,
    "nn_rms_norm accumulator rms_norm: line 44, node 2: _wide(x) became x": _ROUNDED,
    "add_rms_norm accumulator add_rms_norm: line 46, node 31: rows.wide(total) became total": _ROUNDED,
    "rms_norm gradient rms_norm_backward: line 64, node 22: rows.wide(x) became x": _ROUNDED,
    "add_rms_norm gradient add_rms_norm_backward: line 72, node 22: rows.wide(total) became total": _ROUNDED,
}
"""The mutant's name, and why nothing is wrong with it."""
