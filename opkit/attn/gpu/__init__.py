"""Attention on GPUs: kernels in Triton, and in Gluon for Hopper.

========== ==================================================================================
portable   in plain Triton, for every call: forward, backward, biases' gradients, float8
hopper     in Gluon for sm_90, and in CUDA C++ where Gluon falls short: forward and backward of long calls
decode     few queries on many keys, keys in pages, and what fills the pages
mla        few queries of latent attention, in Gluon for sm_90
device     functions of the GPU that several of these share
========== ==================================================================================

In each of them ``device`` holds what runs on the GPU, which is not imported before a kernel is called.
"""
