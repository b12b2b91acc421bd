"""``mx.weight_only_mm`` of few rows on CPU: the kernel of ``weight_only_mm.h``.

    out = x [M, K] · wᵀ [N, K] (+ bias)        BF16 or FP32 x; w as it is stored, codes along its rows

More rows than `MOST_ROWS`, and weights that do not lie in memory as they are multiplied, are dequantized
once, for the vendor's GEMM (see `inductor.dequantized`). A bias of another shape than [N] is added behind.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings, to_dtype
from torch._inductor.virtualized import V

from mxcompile.formats import elem_type
from mxcompile.lowering.cpu import MOST_ROWS, kernel
from mxcompile.lowering.cpu.kernel import C_TYPES, Code, Words

_ADD = lowerings[torch.ops.aten.add.Tensor]


def product(
    x: ir.TensorBox,
    qdata: ir.TensorBox,
    scale: ir.TensorBox,
    bias: ir.TensorBox | None,
    out_dtype: torch.dtype,
) -> ir.TensorBox | None:
    """The result of the operator; None where the weight is better dequantized."""
    device, sources = (
        x.get_device_or_error(),
        (x.get_dtype(), torch.float32 if bias is None else bias.get_dtype()),
    )
    if device.type != "cpu" or kernel.obstacle() or not all(dtype in C_TYPES for dtype in sources):
        return None
    (m, k), n = x.get_size(), qdata.get_size()[0]
    if V.graph.sizevars.optimization_hint(m) > MOST_ROWS:
        return None
    inside = bias is not None and len(bias.get_size()) == 1
    inputs = {"x": kernel.stored(x), "codes": kernel.stored(qdata), "scales": kernel.stored(scale)}
    if bias is not None and inside:
        inputs["bias"] = kernel.stored(_expanded(bias, n))
    alone = (inside or bias is None) and out_dtype in C_TYPES
    made_dtype = out_dtype if alone else torch.float32
    elem = f"mxcompile::{elem_type(qdata.get_dtype()).name.upper()}"
    no_bias = "static_cast<const float*>(nullptr)"

    def body(words: Words) -> str:
        operands = ", ".join(words.pointer(name) for name in ("x", "codes", "scales"))
        added = words.pointer("bias") if inside else no_bias
        shape = f"mxcompile::Shape{{{words.sizes(m, n, k)}}}"
        return (
            f"mxcompile::weight_only_mm<{elem}>({operands}, {added}, {shape},"
            f" {words.threads}, {words.pointer('out')});"
        )

    code = Code(header="weight_only_mm.h", body=body)
    (made,) = kernel.call(code, inputs, {"out": ([m, n], made_dtype)}, device)
    if alone:
        return made
    total: Any = made if bias is None or inside else _ADD(made, bias)
    result: ir.TensorBox = to_dtype(total, out_dtype)
    return result


def _expanded(bias: ir.TensorBox, n: Any) -> ir.TensorBox:
    expanded: ir.TensorBox = lowerings[torch.ops.aten.expand.default](bias, [n])
    return expanded
