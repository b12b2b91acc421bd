"""One rank of a mesh on fake ranks: the mesh, the parallelised model, and a fake copy of the model."""
