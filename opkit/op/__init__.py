"""Operators: definition, schema, derived and registered rules, kernel selection, dispatch, registry. See README.md."""
