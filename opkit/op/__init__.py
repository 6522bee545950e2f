"""What an operator is: definition, schema, rules derived and given, kernel selection, registry."""
