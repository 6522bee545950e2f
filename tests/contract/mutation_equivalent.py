"""Mutants that compute what the original computes, or nothing that the contract forbids: looked into one by one."""

EQUIVALENT: dict[str, str] = {}
"""The mutant's name, and why nothing is wrong with it."""
