"""Run one call of a kernel in a child process, under the address and undefined-behaviour sanitizers."""
