"""Outcomes of calls, their comparison with one another and with the reference, and tolerances."""
