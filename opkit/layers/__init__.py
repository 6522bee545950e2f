"""Control flow for models whose steps or layers repeat."""
