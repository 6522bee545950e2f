"""The build cache on disk."""
