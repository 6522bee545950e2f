"""An operator under torch's tracing: fake tensors, symbolic sizes, compiled programs, derivatives."""
