"""Choosing the fastest of several configurations or kernels: measured once, recorded on disk, found by later processes."""
