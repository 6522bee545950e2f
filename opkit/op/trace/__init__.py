"""What a reference does: which torch operators it calls, what it reads and what it writes to."""
