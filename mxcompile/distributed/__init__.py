"""FSDP2 all-gathers of weights in MXFP8."""

from mxcompile.distributed.gathers import GatheredWeight as GatheredWeight
from mxcompile.distributed.gathers import QuantizedGathers as QuantizedGathers
from mxcompile.distributed.gathers import quantize_gathers_ as quantize_gathers_
