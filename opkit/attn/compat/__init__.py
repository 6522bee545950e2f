"""Attention behind other libraries' interfaces: torch's sdpa and flex_attention, transformers."""
