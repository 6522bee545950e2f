"""Debug builds: one call in a child process, under the sanitizers."""
