"""Inductor template of ``mx.matmul`` for batches: one grid with a product of MX matrices for each entry.

    out[q] = epilogue(round(a[q] · b[q] (+ bias[q])))             FP32 accumulation, one rounding

Operands are read in place, K-major or MN-major, with any strides; an operand or a bias that all entries share
has stride 0 and is not copied. Scales are row-major bytes. Operands may be packed FP4 (see `coding`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._inductor import ir
from torch._inductor.lowering import expand
from torch._inductor.select_algorithm import TritonTemplate, realize_inputs
from torch._inductor.virtualized import V

from mxcompile.lowering.templates.coding import HEAD, Coding
from mxcompile.lowering.templates.tile import IMPORTS, STORE, TILE, batch_grid, select

_SOURCE = (
    IMPORTS
    + HEAD.replace("OTHERS", "[]")
    + r"""
    M = {{size("A", 1)}}
    N = {{size("B", 2)}}
    length = {{size("A", 2)}}
    begin, end = 0, length * scaled_tile.packed(ELEM_A)
    entry = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    idx_q = (tl.program_id(0) // entry).to(INDEX_DTYPE)
    pid_m, pid_n = tile_of(tl.program_id(0) % entry, M, N, BLOCK_M, BLOCK_N)
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    end_m = M
    a = A + idx_q.to(tl.int64) * {{stride("A", 0)}}
    b = B + idx_q.to(tl.int64) * {{stride("B", 0)}}
    sa = SA + idx_q.to(tl.int64) * {{stride("SA", 0)}}
    sb = SB + idx_q.to(tl.int64) * {{stride("SB", 0)}}
{% if TWO_LEVEL %}
    ta += idx_q.to(tl.int64) * {{stride("TA", 0)}}
    tb += idx_q.to(tl.int64) * {{stride("TB", 0)}}
{% endif %}
"""
    + TILE
    + r"""
{% if BIASED %}
    bias = BIAS + idx_q.to(tl.int64) * {{stride("BIAS", 0)}} + idx_n.to(tl.int64) * {{stride("BIAS", 2)}}
{% if BIAS_ROWS %}
    acc += tl.load(bias + idx_m.to(tl.int64) * {{stride("BIAS", 1)}}, mask=mask, other=0.0).to(tl.float32)
{% else %}
    acc += tl.load(bias, mask=idx_n < N, other=0.0).to(tl.float32)
{% endif %}
{% endif %}
"""
    + STORE.replace("INDICES", '("idx_q", "idx_m", "idx_n")')
)


TEMPLATE = TritonTemplate(name="mx_scaled_bmm", grid=batch_grid, source=_SOURCE)


def lower(
    sides: Sequence[ir.TensorBox], bias: ir.TensorBox | None, out_dtype: torch.dtype, coding: Coding
) -> ir.TensorBox:
    """Returns the products a [Q, M, K] · b [Q or 1, K, N] or [K, N] (+ bias, which broadcasts to them).

    sides: a, its scale, b, its scale.
    """
    a, scale_a, b, scale_b = sides
    q, m, _ = a.get_size()
    n = b.get_size()[-1]
    expanded = [a, scale_a, *(expand(side, [q, *side.get_size()[-2:]]) for side in (b, scale_b))]
    operands = [*map(realize_inputs, expanded), *coding.tensors]
    own_rows = False
    if bias is not None:
        operands.append(realize_inputs(expand(bias, [q, m, n])))
        own_rows = not V.graph.sizevars.statically_known_equals(operands[-1].get_stride()[1], 0)
    layout = ir.FixedLayout(a.get_device_or_error(), out_dtype, [q, m, n])
    return select(TEMPLATE, operands, layout, m, coding, BIASED=bias is not None, BIAS_ROWS=own_rows)
