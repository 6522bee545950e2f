"""What a person sees of a check: text, JSON, a page, and scripts that show a failure."""
