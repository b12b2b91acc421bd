"""The compile core: it takes Dynamo's graph to Inductor and installs the hooks of the passes."""
