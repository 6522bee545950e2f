"""The output of a check: text, JSON, an HTML page, and scripts that reproduce a failure."""
