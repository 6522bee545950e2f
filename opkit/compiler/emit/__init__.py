"""Kernels to source text. ``analysis`` is what any emitter needs; each emitter is a folder of its own: ``c``."""
