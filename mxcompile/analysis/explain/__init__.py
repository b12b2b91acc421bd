"""Reports of a model without running it, and estimates for a target."""
