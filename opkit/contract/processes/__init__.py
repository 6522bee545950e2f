"""Other processes: calls that crash or hang, memory in which wrong accesses show, and whole properties in parallel."""
