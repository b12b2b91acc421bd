"""MX data as tensors: qdata and scales."""

from mxcompile.storage import operators as operators
from mxcompile.storage.cast import quantize as quantize
from mxcompile.storage.tensor import MXTensor as MXTensor
