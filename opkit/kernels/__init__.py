"""How a kernel comes to run: declarations, compilers, the build cache, and what a call passes to C."""
