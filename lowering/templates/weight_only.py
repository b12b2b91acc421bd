"""Inductor template of ``mx.weight_only_mm``: weights decoded in registers, and a fused epilogue.

    acc[m, n] = Σ_k x[m, k] · w[n, k] · 2^(sw[n, k/32] − 127)  (+ bias[n])                       in FP32
    acc[m, n] = Σ_k x[m, k] · w[n, k] · sw[n, k/16] / whole[n]  (+ bias[n])                      two levels
    out       = epilogue(acc)                                 K whole: the template's own epilogue
    out       = epilogue(Σ_part acc[part, m, n] (+ bias[n]))  K split: a generated kernel sums in fixed order

The weight is read as it is stored. The form with a dot reads it once for all rows of x. Device functions are
in `kernels.weight_only_mm`. All sizes are supported; offsets into weights have 64 bits. All other products
dequantize the weight; `inductor.decode` lowers them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import add, expand, sum_, to_dtype
from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate, realize_inputs
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from mxcompile.formats import Format
from mxcompile.lowering.choices.configs import single
from mxcompile.lowering.choices.weight_only_forms import WeightOnlyForm, forms, row_of
from mxcompile.lowering.targets import Target, of_device
from mxcompile.lowering.templates import call
from mxcompile.lowering.templates.persistent import starts_aligned

_SOURCE = r"""
from mxcompile.lowering.kernels import weight_only_mm as weight_only

{{def_kernel("X", "W", "SCALE", *(["WHOLE"] if DIVIDED else []) + (["BIAS"] if BIASED else []))}}
    M = {{size("X", 0)}}
    N = {{size("W", 0)}}
    K = {{size("X", 1)}}
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    part = tl.program_id(1)
    column = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    span = tl.cdiv(tl.cdiv(K, BLOCK_K), PARTS) * BLOCK_K
    first = part * span
    last = tl.minimum(K, first + span)
    codes = W.to(tl.pointer_type(tl.uint8), bitcast=True)
    scales = SCALE.to(tl.pointer_type(tl.uint8), bitcast=True)
{% if ON_TENSOR_CORES %}
    row = pid // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    idx_m = row[None, :]
    idx_n = column[:, None]
{% else %}
    row = pid // tiles_n
    idx_m = row + tl.zeros((1, 1), tl.int32)
    idx_n = column[None, :]
{% endif %}
    acc = weight_only.sums(
        X, codes, scales, row, column, first, last, M, N, K,
        {{stride("X", 0)}}, {{stride("X", 1)}},
        {{stride("W", 0)}}, {{stride("W", 1)}},
        {{stride("SCALE", 0)}}, {{stride("SCALE", 1)}},
        ELEM, NATIVE, TWO_LEVEL, WORDS, PTX, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, ON_TENSOR_CORES,
    )
{% if DIVIDED %}
    acc = tl.div_rn(acc, tl.load(WHOLE + idx_n * {{1 if OF_ROWS else 0}}, mask=idx_n < N, other=1.0))
{% endif %}
{% if BIASED %}
    acc += tl.load(BIAS + idx_n, mask=idx_n < N, other=0.0).to(tl.float32)
{% endif %}
    mask = (idx_m < M) & (idx_n < N)
{% set indices = ("part", "idx_m", "idx_n") if PARTS > 1 else ("idx_m", "idx_n") %}
{% set shape = ("BLOCK_N", "BLOCK_M") if ON_TENSOR_CORES else ("1", "BLOCK_N") %}
    {{store_output(indices, "acc", "mask", val_shape=shape)}}
"""


@SymbolicGridFn
def _grid(*arguments: Any, cdiv: Any) -> tuple[Any, int, int]:
    """Returns the numbers of tiles and of parts. Only the first axis of a grid is long enough for tiles."""
    *_, m, n, meta = arguments
    return cdiv(m, meta["BLOCK_M"]) * cdiv(n, meta["BLOCK_N"]), meta["PARTS"], 1


TEMPLATE = TritonTemplate(name="mx_weight_only_mm", grid=_grid, source=_SOURCE)

_ACTIVATIONS = frozenset({torch.bfloat16, torch.float16, torch.float32})


def lower_weight_only_mm(
    x: ir.TensorBox,
    qdata: ir.TensorBox,
    scale: ir.TensorBox,
    bias: ir.TensorBox | None,
    out_dtype: torch.dtype,
    fmt: str,
    global_scale: ir.TensorBox | None = None,
) -> ir.TensorBox | None:
    """Returns the product x [M, K] · wᵀ [N, K] (+ bias); None for products without a tile."""
    target = _target(x, qdata)
    if target is None:
        return None
    m, n, k = x.get_size()[0], qdata.get_size()[0], x.get_size()[1]
    rows, columns, depth = (V.graph.sizevars.optimization_hint(size) for size in (m, n, k))
    form = Format.parse(fmt)
    choices = forms(rows, columns, depth, x.get_dtype(), target, packed=form.packed)
    parts = choices[0].parts
    operands = {"X": x, "W": readable(qdata, target), "SCALE": readable(scale, target)}
    if global_scale is not None:
        operands["WHOLE"] = global_scale
    inside = bias is not None and len(bias.get_size()) == 1 and parts == 1
    if inside:
        operands["BIAS"] = expand(bias, [n])
    alone = parts == 1 and (inside or bias is None)
    device = x.get_device_or_error()
    size = [m, n] if parts == 1 else [parts, m, n]
    layout = ir.FixedLayout(device, out_dtype if alone else torch.float32, size)
    template = _template(choices, operands, layout, form, target)
    if alone:
        return template
    total: Any = template if parts == 1 else sum_(template, [0])
    result: ir.TensorBox = to_dtype(total if bias is None else add(total, bias), out_dtype)
    return result


def _target(x: ir.TensorBox, qdata: ir.TensorBox) -> Target | None:
    """Returns the chip that runs the product, or None if the template does not support the product."""
    device = x.get_device_or_error()
    if device.type != "cuda" or x.get_dtype() not in _ACTIVATIONS:
        return None
    target = of_device(device)
    is_equal = V.graph.sizevars.statically_known_equals
    empty = any(is_equal(size, 0) for size in (*x.get_size(), *qdata.get_size()))
    alone = single((x.get_size()[0], qdata.get_size()[0]))
    return None if empty or alone or row_of(target) is None else target


def readable(qdata: ir.TensorBox, target: Target) -> Any:
    """Returns `qdata`, viewed as bytes if Triton lacks pointers to its dtype, without a copy."""
    if target.stores_fp8 or qdata.get_dtype() is torch.uint8:
        return qdata
    return ir.TensorBox.create(ir.FallbackKernel.create(torch.ops.aten.view.dtype, qdata, torch.uint8))


def has_words(scale: Any) -> bool:
    """Whether a kernel can read `scale`, realized [N, blocks], in aligned words of four bytes of a row."""
    sizes = V.graph.sizevars
    (_, blocks), (along_rows, along) = scale.get_size(), scale.get_stride()
    whole = all(sizes.statically_known_multiple_of(number, 4) for number in (blocks, along_rows))
    return whole and bool(sizes.statically_known_equals(along, 1)) and starts_aligned(scale)


def _template(
    choices: list[WeightOnlyForm],
    operands: Mapping[str, Any],
    layout: ir.Layout,
    form: Format,
    target: Target,
) -> ir.TensorBox:
    buffers = [realize_inputs(operand) for operand in operands.values()]
    tried = (
        {
            "num_stages": choice.tile.num_stages,
            "num_warps": choice.tile.num_warps,
            "BLOCK_M": choice.tile.block_m,
            "BLOCK_N": choice.tile.block_n,
            "BLOCK_K": choice.tile.block_k,
            "STAGES": choice.tile.num_stages,
            "PARTS": choice.parts,
            "ON_TENSOR_CORES": choice.on_tensor_cores,
            "BIASED": "BIAS" in operands,
            "DIVIDED": "WHOLE" in operands,
            "OF_ROWS": "WHOLE" in operands and not single(operands["WHOLE"].get_size()),
            "ELEM": repr(form.elem.name),
            "NATIVE": target.decodes_fp8,
            "TWO_LEVEL": form.two_level,
            "WORDS": has_words(buffers[2]),
            "PTX": isinstance(target.arch, int),
        }
        for choice in choices
    )
    labels = [str(choice) for choice in choices]
    forms_of = ((TEMPLATE, arguments) for arguments in tried)
    out: Any = call.best(TEMPLATE.name, buffers, layout, forms_of, labels=labels)
    # x became a buffer during this lowering. Inductor would add its origins, which may be parts of another
    # product, to this product.
    out.data.data.origins = OrderedSet([V.graph.current_node])
    result: ir.TensorBox = out
    return result
