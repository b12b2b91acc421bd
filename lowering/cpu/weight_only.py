"""``mx.weight_only_mm`` on CPU, by four headers.

    out = x [M, K] · wᵀ [N, K] (+ bias)        x: BF16 or FP32. w: stored in blocks along its rows, or in BF16

``weight_only_mm.h`` multiplies few rows by a stored weight, ``few_rows_mm.h`` by a weight in BF16. Many rows
run by ``integer_mm.h`` or ``tile_mm.h`` if `graph.weight_only` chose that. Else the vendor's GEMM multiplies
more rows than `MOST_ROWS` by the dequantized weight, in parts if it is large (see `PART_BYTES`). A bias that
is not a vector is added after the kernel.
"""

from __future__ import annotations

import sympy
import torch
from torch._inductor import ir
from torch._inductor.virtualized import V

from mxcompile.formats import Format
from mxcompile.graph.tags import tags_of
from mxcompile.lowering.cpu import AMX, INT16, MOST_ROWS, kernel, parts_of
from mxcompile.lowering.cpu.casts import StoredBuffers, dequantize_part
from mxcompile.lowering.cpu.kernel import CppNames
from mxcompile.ops.cast import decoded_shape

_FEW = ("weight_only_mm.h", "weight_only_mm")
_MANY = {INT16: ("integer_mm.h", "many_rows_mm"), AMX: ("tile_mm.h", "tile_weight_mm")}
"""Header and function, by the name of the kernel."""


def lower_weight_only_mm(
    x: ir.TensorBox,
    qdata: ir.TensorBox,
    scale: ir.TensorBox | None,
    bias: ir.TensorBox | None,
    out_dtype: torch.dtype,
    fmt: str,
    global_scale: ir.TensorBox | None = None,
) -> ir.TensorBox | None:
    """Returns the result of the operator; None if no kernel multiplies it."""
    if not kernel.takes(x, *(part.get_dtype() for part in (x, bias) if part is not None)):
        return None
    m, n = x.get_size()[0], qdata.get_size()[0]
    if scale is None:
        return _unquantized(x, qdata, bias, out_dtype)
    kernels = " ".join(tag.kernel for tag in tags_of(V.graph.current_node))
    chosen = next((row for name, row in _MANY.items() if name in kernels), None)
    if chosen is None and V.graph.sizevars.optimization_hint(m) > MOST_ROWS:
        return None
    header, function = chosen or _FEW
    weight = StoredBuffers.from_tensors(qdata, scale, Format.parse(fmt), global_scale)
    inputs = {"x": kernel.stored(x), **weight.buffers}

    def body(words: CppNames) -> str:
        return (
            f"mxcompile::{function}({words.pointer('x')}, {weight.words(words)}, {words.optional('bias')},"
            f" {words.size_arguments(m, n)}, {words.threads}, {words.pointer('out')});"
        )

    return kernel.product(header, body, inputs, bias, [m, n], out_dtype)


def _unquantized(
    x: ir.TensorBox, weight: ir.TensorBox, bias: ir.TensorBox | None, out_dtype: torch.dtype
) -> ir.TensorBox:
    size = [x.get_size()[0], *weight.get_size()]

    def body(words: CppNames) -> str:
        x, w, out = map(words.pointer, ("x", "w", "out"))
        tail = f"{words.optional('bias')}, {words.size_arguments(*size)}, {words.threads}"
        return f"mxcompile::few_rows_mm({x}, {w}, {tail}, {out});"

    inputs = {"x": kernel.stored(x), "w": kernel.stored(weight)}
    return kernel.product("few_rows_mm.h", body, inputs, bias, size[:2], out_dtype)


def parts(
    qdata: ir.TensorBox,
    scale: ir.TensorBox,
    dtype: torch.dtype,
    form: Format,
    global_scale: ir.TensorBox | None = None,
) -> list[ir.TensorBox] | None:
    """Returns the weight [N, K] in `dtype` in parts of some rows; None if it is small or unsupported."""
    if not kernel.takes(qdata, dtype) or len(scale.get_size()) != 2:
        return None
    sizes = decoded_shape(qdata.get_size(), -1, form)
    shape = [int(size) if isinstance(size, sympy.Integer) else size for size in sizes]
    if not (ranges := parts_of(shape, dtype)):
        return None
    weight = StoredBuffers.from_tensors(qdata, scale, form, global_scale)
    return [dequantize_part(weight, start, rows, dtype) for start, rows in ranges]
