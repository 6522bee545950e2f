"""What torch makes of an operator: fake tensors, symbolic sizes, graphs, derivatives."""
