"""``opkit build``, ``opkit tune`` and kernels in exported models: compiled and tuned ahead of time."""
