"""Calls as data: tensors' sizes, layouts and numbers, and strategies that draw them."""
