"""Reports and checks of what was compiled, and of what was not."""
