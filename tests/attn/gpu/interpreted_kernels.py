"""All operators of attention with kernels in Triton, for one process in which these run on the CPU."""

import decoding_kernels
import float8_kernels
import listing_kernels
import relative_kernels

import opkit.attn.api

__all__ = ["decoding_kernels", "float8_kernels", "listing_kernels", "opkit", "relative_kernels"]
