"""Sharding rules of operators for DTensor, derived from the reference or registered."""
