"""Load and write kernels that were compiled ahead of time and are shipped inside a Python package."""
