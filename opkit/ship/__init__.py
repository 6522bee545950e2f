"""Compiled models as files: export, load."""
