"""A whole model traced on fake tensors, equal layers once."""
