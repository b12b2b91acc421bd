"""Safetensors checkpoints of models with MXFP8 weights, in the layouts of other projects."""

from mxcompile.checkpoint.export import ExportedWeights as ExportedWeights
from mxcompile.checkpoint.export import export_weights as export_weights
from mxcompile.checkpoint.load import load_quantized as load_quantized
from mxcompile.checkpoint.package import PackagedModel as PackagedModel
from mxcompile.checkpoint.package import load_package as load_package
from mxcompile.checkpoint.package import save_package as save_package
from mxcompile.checkpoint.save import save_quantized as save_quantized
