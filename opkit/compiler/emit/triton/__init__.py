"""The emitter of Triton: kernels for GPUs."""
