"""Store files in the cache directory: the build cache, and atomic writes and locks for every other cache."""
