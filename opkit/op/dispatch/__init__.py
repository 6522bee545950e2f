"""How a call reaches a kernel: torch's dispatcher, the fast path, kernel selection and plans."""
