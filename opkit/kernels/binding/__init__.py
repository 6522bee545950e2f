"""Bind the parameters of a C function, by name, to arguments, outputs, named sizes and expressions."""
