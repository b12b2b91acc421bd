"""The plan, the policies and the checks of each model."""
