"""Studies: runs of a model with single GEMMs quantized or not, without a change of the model."""
