"""Users' functions as C for CPUs: its text, and the code built of it."""
