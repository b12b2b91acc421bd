"""The report of a model that is not run, and estimates for a target."""
