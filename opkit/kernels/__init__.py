"""Declare, bind, build, cache and load kernels in C, C++, CUDA and Triton."""
