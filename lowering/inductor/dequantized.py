"""``mx.weight_only_mm`` on every device: dequantize, then the library's product.

x · wᵀ  →  mm(x, decode(w)ᵀ)                      BF16 if x and the result are BF16, else FP32
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.lowering import lowerings, to_dtype
from torch._inductor.virtualized import V

from mxcompile.formats import Format
from mxcompile.lowering.cpu import weight_only as cpp
from mxcompile.lowering.inductor.general import lower_decode

_MM = lowerings[torch.ops.aten.mm.default]
_ADD = lowerings[torch.ops.aten.add.Tensor]
_CAT = lowerings[torch.ops.aten.cat.default]
_PERMUTE = lowerings[torch.ops.aten.permute.default]


def lower_weight_only_mm(
    x: ir.TensorBox,
    qdata: ir.TensorBox,
    scale: ir.TensorBox,
    bias: ir.TensorBox | None,
    out_dtype: torch.dtype,
    fmt: str,
    global_scale: ir.TensorBox | None = None,
) -> ir.TensorBox:
    """Lowers x [M, K] · wᵀ [N, K] (+ bias)."""
    narrow = x.get_dtype() is torch.bfloat16 and out_dtype is torch.bfloat16
    dtype = torch.bfloat16 if narrow else torch.float32
    weights = cpp.parts(qdata, scale, dtype, Format.parse(fmt), global_scale) or [
        lower_decode(qdata, scale, -1, fmt, dtype, None, global_scale)
    ]
    x = to_dtype(x, dtype)
    outs = [_MM(x, _PERMUTE(weight, [1, 0])) for weight in weights]
    out: Any = outs[0] if len(outs) == 1 else _side_by_side(outs)
    result: ir.TensorBox = to_dtype(out if bias is None else _ADD(out, bias), out_dtype)
    return result


def _side_by_side(outs: list[ir.TensorBox]) -> Any:
    """Concatenates columns. Before PyTorch 2.13 Inductor's cat requires that the current node is a cat."""
    cat = fx.Graph().call_function(torch.ops.aten.cat.default, ([],))
    with V.graph.set_current_node(cat):
        return _CAT(outs, 1)
