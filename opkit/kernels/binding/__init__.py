"""What each parameter of a C function receives: arguments, outputs, named sizes and expressions."""
