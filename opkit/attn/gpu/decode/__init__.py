"""Attention of few queries on many keys: the keys of a head are divided among programs, and their results merged."""
