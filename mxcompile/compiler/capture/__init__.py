"""The graph that Dynamo hands over, and its place in the model."""
