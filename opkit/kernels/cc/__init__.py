"""Kernels in C, C++ and CUDA: declarations, compilers, flags and the source that is compiled."""
