"""Attention on GPUs: kernels in Triton, and in Gluon for Hopper.

========== ==================================================================================
portable   in plain Triton, for every call: forward, backward, biases' gradients, float8
hopper     for sm_90, in Gluon, and in CUDA C++ where Gluon falls short: forward and backward of long calls, decoding (also of
           latent attention)
decode     few queries on many keys, keys in pages, and writing to pages
device     functions of the GPU that several of these share
========== ==================================================================================

In each of them ``device`` holds what runs on the GPU, which is not imported before a kernel is called.
"""
