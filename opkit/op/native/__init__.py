"""Kernels that run through torch's dispatcher without Python: those in C, C++, CUDA and Triton."""
