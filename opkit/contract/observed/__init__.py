"""What a call did: its results, its arguments, the random state and torch's settings; several calls at once."""
