"""Models whose weights are stored in MXFP8: choosing the weights, storing them, checkpoints."""

from mxcompile.serving.ahead import aoti_configs as aoti_configs
from mxcompile.serving.table import StoredWeight as StoredWeight
from mxcompile.serving.table import StoredWeights as StoredWeights
from mxcompile.serving.weights import quantize_weights_ as quantize_weights_
