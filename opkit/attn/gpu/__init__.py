"""Attention on GPUs: kernels in Triton, and for Hopper in CUDA C++ and Gluon.

========== ==================================================================================
portable   in plain Triton, for every call: forward, backward, biases' gradients, float8
hopper     for sm_90, in CUDA C++: the forward, the backward of long calls, decoding; and in Gluon: the backward of other calls,
           latent attention
decode     few queries on many keys, keys in pages, and writing to pages
device     functions of the GPU that several of these share
========== ==================================================================================

In each of them ``device`` holds what runs on the GPU, which is not imported before a kernel is called.
"""
