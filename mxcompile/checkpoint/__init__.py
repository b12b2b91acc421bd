"""Safetensors checkpoints of models whose weights are stored in MXFP8, in the layouts of others."""

from mxcompile.checkpoint.export import ExportedWeights as ExportedWeights
from mxcompile.checkpoint.export import export_weights as export_weights
from mxcompile.checkpoint.load import load_quantized as load_quantized
from mxcompile.checkpoint.save import save_quantized as save_quantized
