"""What runs on the GPU. Nothing here is imported before a kernel is called."""
