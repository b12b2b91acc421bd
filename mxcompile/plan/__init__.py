"""The plan of a whole model, traced on fake tensors with equal layers folded."""
