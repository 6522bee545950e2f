"""Attention for sm_90 in CUDA C++ and Gluon: TMA, warps that load and warpgroups that multiply."""
