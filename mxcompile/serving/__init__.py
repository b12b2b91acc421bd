"""Inference with weights, or keys and values, stored in MXFP8."""

from mxcompile.serving.ahead import aoti_configs as aoti_configs
from mxcompile.serving.static import static_cache as static_cache
from mxcompile.serving.weights import quantize_weights_ as quantize_weights_
from mxcompile.storage.weights import StoredWeight as StoredWeight
from mxcompile.storage.weights import StoredWeights as StoredWeights
