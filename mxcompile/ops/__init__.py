"""The mx operators: the IR between the passes, which write them, and the lowering, which generates kernels.

`cast`, `decode`, `matmul` and `grouped_matmul` take formats as words. The other operators fuse them, compute
their inputs, serve stored weights, or watch a run. All are functional except `deliver`, and return contiguous
tensors.
"""

from mxcompile.ops.attention import attention as attention
from mxcompile.ops.cast import cast as cast
from mxcompile.ops.cast import decode as decode
from mxcompile.ops.cast import hadamard as hadamard
from mxcompile.ops.define import SPECS as SPECS
from mxcompile.ops.define import Spec as Spec
from mxcompile.ops.products import flatten as flatten
from mxcompile.ops.products import grouped_matmul as grouped_matmul
from mxcompile.ops.products import grouped_mm as grouped_mm
from mxcompile.ops.products import grouped_product as grouped_product
from mxcompile.ops.products import matmul as matmul
from mxcompile.ops.products import quantize_mm as quantize_mm
from mxcompile.ops.products import scale_bytes as scale_bytes
from mxcompile.ops.products import weight_only_mm as weight_only_mm
from mxcompile.ops.state import OPERANDS as OPERANDS
from mxcompile.ops.state import known_scale as known_scale
from mxcompile.ops.state import largest as largest
from mxcompile.ops.state import mean as mean
from mxcompile.ops.state import slot as slot
from mxcompile.ops.state import tapped as tapped
from mxcompile.ops.watch import cast_statistics as cast_statistics
from mxcompile.ops.watch import deliver as deliver
from mxcompile.ops.watch import excerpt as excerpt
from mxcompile.ops.watch import nonfinite as nonfinite

CASTS = frozenset({cast.overloadpacket, decode.overloadpacket})
"""The operators that change the format of a tensor."""

CAST_WORK = CASTS | {op.overloadpacket for op in (largest, hadamard)}
"""Casts, and operators that only prepare casts. A kernel of these operators alone counts as a cast."""

PRODUCTS = frozenset({matmul.overloadpacket, grouped_matmul.overloadpacket})
"""The GEMMs of quantized operands."""
