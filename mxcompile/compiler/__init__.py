"""The compile core: from the graph that Dynamo hands over to Inductor, with the hooks in between."""
