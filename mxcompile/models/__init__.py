"""A user's module: its paths, blocks, wrappers and arguments, and copies of it on fake tensors."""
