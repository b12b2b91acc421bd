"""What a user's module is: its paths, blocks, wrappers and arguments, and copies of it on fake tensors."""
