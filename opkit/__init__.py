"""opkit: custom operators for PyTorch from one function."""

__version__ = "0.1.0"
