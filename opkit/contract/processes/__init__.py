"""Calls in other processes: those that crash or hang, first calls, and whole properties."""
