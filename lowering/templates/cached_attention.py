"""Inductor template of ``mx.attention``: few queries over MXFP8 keys and values, decoded in registers.

    total[part], top[part], sum[part]   for each part of the keys, by ``lowering.kernels.cached_attention``
    out = Σ_part total · e^(top − max top) / Σ_part sum · e^(top − max top)    a generated kernel

A program takes one part of one head of keys and values, and the queries of all heads that share it. The
template takes BF16 queries of any sizes, with head_dim up to `attention_forms.MOST_DIMS`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings, to_dtype
from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate, realize_inputs
from torch._inductor.virtualized import V

from mxcompile.formats import Format
from mxcompile.lowering.choices.attention_forms import form
from mxcompile.lowering.targets import of_device
from mxcompile.lowering.templates import call
from mxcompile.lowering.templates.weight_only import readable

_STAGES = 2

_SOURCE = r"""
from mxcompile.lowering.kernels import cached_attention

{{def_kernel("Q", "K", "K_SCALE", "V", "V_SCALE", "TOP", "SUM", *(["MASK"] if MASKED else []))}}
    B = {{size("Q", 0)}}
    H = {{size("Q", 1)}}
    QUERIES = {{size("Q", 2)}}
    D = {{size("Q", 3)}}
    KV = {{size("K", 1)}}
    T = {{size("K", 2)}}
    part = tl.program_id(0) % PARTS
    group = tl.program_id(0) // PARTS
    entry = group // KV
    shared = H // KV
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    dim = tl.arange(0, BLOCK_D)
    head = group % KV * shared + row // QUERIES
    query = row % QUERIES
    in_rows = row < shared * QUERIES
    mask = in_rows[:, None] & (dim < D)[None, :]
    start = entry.to(tl.int64) * {{stride("Q", 0)}} + head * {{stride("Q", 1)}} + query * {{stride("Q", 2)}}
    q = tl.load(Q + start[:, None] + dim[None, :] * {{stride("Q", 3)}}, mask=mask, other=0.0)
    first = group.to(tl.int64) * T
    blocks = (D + 31) // 32
    keys = K.to(tl.pointer_type(tl.uint8), bitcast=True) + first * D
    values = V.to(tl.pointer_type(tl.uint8), bitcast=True) + first * D
{% if MASKED %}
    masks = MASK
    mask_start = (row * 0).to(tl.int64)
{% for index, name in ((0, "entry"), (1, "head"), (2, "query")) %}
{% if not SHARED[index] %}
    mask_start += {{name}} * {{stride("MASK", index)}}
{% endif %}
{% endfor %}
    stride_mask = {{stride("MASK", 3)}}
{% else %}
    masks = None
    mask_start = row
    stride_mask = 0
{% endif %}
    total, top, weight = cached_attention.attend(
        q, keys, K_SCALE + first * blocks, values, V_SCALE + first * blocks, masks, mask_start, stride_mask,
        in_rows, dim, FACTOR, part, T, D, ELEM, NATIVE, MASKED, PARTS, TILE, STAGES,
    )
    place = ((part.to(tl.int64) * B + entry) * QUERIES + query) * H + head
    tl.store(TOP + place, top, mask=in_rows)
    tl.store(SUM + place, weight, mask=in_rows)
    idx_query = query[:, None]
    idx_head = head[:, None]
    idx_dim = dim[None, :]
    {{store_output(("part", "entry", "idx_query", "idx_head", "idx_dim"), "total", "mask",
                   val_shape=("BLOCK_R", "BLOCK_D"))}}
"""


@SymbolicGridFn
def _grid(*arguments: Any, cdiv: Any) -> tuple[Any, Any, int]:
    """Returns the grid: parts of all heads of keys, by tiles of the queries that share a head."""
    _, batch, queries, heads, _, meta = arguments
    groups = batch * meta["KV_HEADS"]
    return groups * meta["PARTS"], cdiv(heads * queries, meta["KV_HEADS"] * meta["BLOCK_R"]), 1


TEMPLATE = TritonTemplate(name="mx_attention", grid=_grid, source=_SOURCE)


def lower_attention(
    q: ir.TensorBox,
    keys: ir.TensorBox,
    key_scales: ir.TensorBox,
    values: ir.TensorBox,
    value_scales: ir.TensorBox,
    mask: ir.TensorBox | None,
    factor: float,
    fmt: str,
) -> ir.TensorBox | None:
    """Returns the result of ``mx.attention``, [B, Q, H, D]; None for other chips and dtypes."""
    device, hint = q.get_device_or_error(), V.graph.sizevars.optimization_hint
    is_equal = V.graph.sizevars.statically_known_equals
    target = of_device(device)
    if device.type != "cuda" or target.arch is None or q.get_dtype() is not torch.bfloat16:
        return None
    batch, heads, queries, dim = q.get_size()
    kv_heads, length = keys.get_size()[1:3]
    if mask is not None:
        for _ in range(4 - len(mask.get_size())):
            mask = lowerings[torch.ops.aten.unsqueeze.default](mask, 0)
    chosen = form(hint(batch * kv_heads), hint(heads * queries // kv_heads), hint(length), hint(dim), target)
    stored = [readable(keys, target), key_scales, readable(values, target), value_scales]
    shape = [chosen.parts, batch, queries, heads]
    parts = call.only(
        TEMPLATE,
        [realize_inputs(q), *(ir.ExternKernel.require_contiguous(realize_inputs(part)) for part in stored)],
        [([*shape, dim], torch.float32), *[(shape, torch.float32)] * 2],
        last=[] if mask is None else [realize_inputs(mask)],
        num_stages=_STAGES,
        num_warps=4,
        BLOCK_R=chosen.rows,
        BLOCK_D=chosen.dims,
        TILE=chosen.keys,
        STAGES=_STAGES,
        PARTS=chosen.parts,
        KV_HEADS=kv_heads,
        MASKED=mask is not None,
        SHARED=() if mask is None else tuple(is_equal(size, 1) for size in mask.get_size()[:3]),
        FACTOR=float(factor),
        ELEM=repr(Format.parse(fmt).elem.name),
        NATIVE=target.decodes_fp8,
    )
    result: ir.TensorBox = to_dtype(_merged(*parts), q.get_dtype())
    return result


def _merged(total: Any, top: Any, sum_: Any) -> Any:
    """Returns the sum of the parts, each rescaled from its own maximum; 0 for queries without keys."""
    aten = torch.ops.aten
    add_dim, where = lowerings[aten.unsqueeze.default], lowerings[aten.where.self]
    multiply, total_of = lowerings[aten.mul.Tensor], lowerings[aten.sum.dim_IntList]
    most = lowerings[aten.amax.default](top, [0], keepdims=True)
    none = lowerings[aten.eq.Scalar](most, -float("inf"))
    base = where(none, 0.0, most)
    share = lowerings[aten.exp.default](lowerings[aten.sub.Tensor](top, base))
    weight = total_of(multiply(sum_, share), [0])
    empty = lowerings[aten.eq.Scalar](weight, 0)
    weight = where(empty, 1.0, weight)
    values = total_of(multiply(total, add_dim(share, -1)), [0])
    return lowerings[aten.div.Tensor](values, add_dim(weight, -1))
