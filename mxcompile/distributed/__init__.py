"""FSDP2 all-gathers of weights in MXFP8."""

from mxcompile.distributed.gathers import quantize_gathers_ as quantize_gathers_
from mxcompile.distributed.table import GatheredWeight as GatheredWeight
from mxcompile.distributed.table import QuantizedGathers as QuantizedGathers
