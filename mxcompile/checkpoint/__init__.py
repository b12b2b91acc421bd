"""Safetensors checkpoints of models with MXFP8 weights, in the layouts of other projects, and packages."""
