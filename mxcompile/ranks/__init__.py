"""A model on one rank of a mesh: the mesh on fake ranks, the model parallelised there, and its copy."""
