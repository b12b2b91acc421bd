"""Dynamo's graph and its position in the model."""
