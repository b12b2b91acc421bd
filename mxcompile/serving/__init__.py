"""Models whose weights, and keys and values, are stored in MXFP8: which, how, their checkpoints."""

from mxcompile.serving.ahead import aoti_configs as aoti_configs
from mxcompile.serving.static import static_cache as static_cache
from mxcompile.serving.table import StoredWeight as StoredWeight
from mxcompile.serving.table import StoredWeights as StoredWeights
from mxcompile.serving.weights import quantize_weights_ as quantize_weights_
