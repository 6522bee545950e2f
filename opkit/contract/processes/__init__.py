"""Calls in other processes: those that crash or hang, those that nothing came before, and whole properties."""
