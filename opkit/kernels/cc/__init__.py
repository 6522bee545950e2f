"""Declare and compile kernels in C, C++ and CUDA: declarations, generated source, compilers and flags."""
