"""Gradients, vmap, forward mode, autocast and FLOPs: rules that are registered or derived from the reference."""
