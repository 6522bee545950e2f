"""Functions of shared libraries that are installed."""
