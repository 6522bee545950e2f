"""Users' functions as masks and biases: tracing, their expressions, and what known opcodes can express of them."""
