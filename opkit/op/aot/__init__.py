"""``opkit build`` and ``opkit tune``: kernels compiled and tuned ahead of time."""
