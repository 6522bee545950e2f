"""Observation of calls: results, arguments, random state, torch's settings, and several calls at once."""
