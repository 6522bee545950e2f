"""The architectures, one file a family; ``table`` lists them."""
