"""Inductor template of ``mx.quantize_mm``: the product's kernel casts its activation in registers.

    out = epilogue(round(quantize(x)[M, K] · b[K, N] (+ bias[N])))        FP32 accumulation, one rounding

The main loop reads x as it is, and quantizes it bit for bit as the cast does (`kernels.tiles`). No FP8 copy
is stored. But each row of x is quantized again for every tile of N. With few rows this takes little time
beside reading the weight, and the launch of the cast is saved, so the fused kernel is the default. With many
rows, if Inductor autotunes and N is narrow, it is timed against a separate cast and product.

Scales of b are row-major bytes or tiled. SWAP computes outᵀ, as in ``scaled_mm``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.codegen.subgraph import SubgraphChoiceCaller
from torch._inductor.kernel.mm_common import mm_grid
from torch._inductor.lowering import expand, lowerings, register_lowering
from torch._inductor.select_algorithm import TritonTemplate, realize_inputs
from torch._inductor.utils import triton_type
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

from mxcompile import ops
from mxcompile.formats import Copy, Format, ScaleLayout
from mxcompile.lowering.choices.configs import fused, products
from mxcompile.lowering.inductor.winners import choose
from mxcompile.lowering.targets import of_device
from mxcompile.lowering.templates import call, examples
from mxcompile.lowering.templates.tile import blocks, index_type

_SOURCE = r"""
from mxcompile.lowering.kernels import scale_bytes, tiles
from mxcompile.lowering.kernels.scaled_tile import tile_of

{{def_kernel("X", "B", "SB", *(["BIAS"] if BIASED else []))}}
{% set shape = ("BLOCK_N", "BLOCK_M") if SWAP else ("BLOCK_M", "BLOCK_N") %}
    M = {{size("X", 0)}}
    N = {{size("B", 1)}}
    K = {{size("X", 1)}}
    num_blocks = (K + 31) // 32
    pid_m, pid_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N)
    rm = pid_m.to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n.to(INDEX) * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tl.arange(0, BLOCK_K)
    rs = tl.arange(0, BLOCK_K // 32)
    in_n = rn < N
    b_ptrs = B + rk[:, None].to(INDEX) * {{stride("B", 0)}} + rn[None, :] * {{stride("B", 1)}}
    acc = tl.zeros(({{shape|join(", ")}}), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = (start + rk).to(INDEX)
        idx_m = rm[:, None]
        idx_k = k[None, :]
        x_mask = (idx_m < M) & (idx_k < K)
        {{load_input("X", "x", ("idx_m", "idx_k"), mask="x_mask", indent_width=8,
                     index_shape=("BLOCK_M", "BLOCK_K"))}}
        codes, scale = tiles.quantize_rowwise(x.to(DTYPE), ELEM_X, ROUNDING, NATIVE)
{% if EVEN_K %}
        b = tl.load(b_ptrs, mask=in_n[None, :], other=0.0)
{% else %}
        b = tl.load(b_ptrs, mask=(k[:, None] < K) & in_n[None, :], other=0.0)
{% endif %}
{% if TILED %}
        sb = scale_bytes.load_tiled(
            SB, pid_n * BLOCK_N, start // BLOCK_K, N, K, BLOCK_N, BLOCK_K // 32, EVEN_N and EVEN_K, WORDS)
{% else %}
        block = start // 32 + rs
        sb_ptrs = SB + rn[:, None] * {{stride("SB", 1)}} + block[None, :].to(INDEX) * {{stride("SB", 0)}}
        sb = tl.load(sb_ptrs, mask=in_n[:, None] & (block[None, :] < num_blocks), other=0)
{% endif %}
{% if SWAP %}
        acc = tl.dot_scaled(b.T, sb, ELEM_B, codes.T, scale, ELEM_X, acc)
{% else %}
        acc = tl.dot_scaled(codes, scale, ELEM_X, b, sb, ELEM_B, acc)
{% endif %}
        b_ptrs += BLOCK_K * {{stride("B", 0)}}
{% if SWAP %}
    idx_m = rm[None, :]
    idx_n = rn[:, None]
{% else %}
    idx_m = rm[:, None]
    idx_n = rn[None, :]
{% endif %}
{% if BIASED %}
    acc += tl.load(BIAS + idx_n, mask=idx_n < N, other=0.0).to(tl.float32)
{% endif %}
    mask = (idx_m < M) & (idx_n < N)
    {{store_output(("idx_m", "idx_n"), "acc", "mask", val_shape=shape)}}
"""

TEMPLATE = TritonTemplate(name="mx_quantize_mm", grid=mm_grid, source=_SOURCE)


@register_lowering(ops.quantize_mm, type_promotion_kind=None)
def lower_quantize_mm(
    x: ir.TensorBox,
    b: ir.TensorBox,
    scale_b: ir.TensorBox,
    bias: ir.TensorBox | None,
    out_dtype: torch.dtype,
    format_x: str,
    format_b: str,
    qdata: ir.TensorBox | None = None,
    scale: ir.TensorBox | None = None,
) -> ir.TensorBox:
    """Returns the product. qdata, scale: results of a separate cast, if it may win (see `graph.fuse`)."""
    (m, _), n = x.get_size(), b.get_size()[1]
    operands = [realize_inputs(operand) for operand in (x, b, scale_b)]
    if bias is not None:
        operands.append(realize_inputs(expand(bias, [n])))
    layout = ir.FixedLayout(x.get_device_or_error(), out_dtype, [m, n])
    form = Format.parse(format_x)
    tried = ((TEMPLATE, arguments) for arguments in _choices(operands, layout, form, Format.parse(format_b)))
    choices = call.choices_of(operands, layout, tried)
    if qdata is not None and scale is not None:
        product = [qdata, scale, b, scale_b, bias, out_dtype, str(form.as_read), format_b]
        is_tiled = len(scale.get_size()) == 1
        cast = str(Copy(format=form, layout=ScaleLayout.TILED_128X4 if is_tiled else ScaleLayout.ROW_MAJOR))
        choices.append(Separate(operands, layout, cast, product))
    return choose(TEMPLATE.name, choices, operands, layout, examples=examples.stored(), at_once=True)


class Separate(SubgraphChoiceCaller):
    """The choice of a separate cast and product. Inductor times a graph with both, and lowers the product.

    cast: the copy, as text. product: arguments of ``mx.matmul``, with the results of the cast in the lowered
    graph, which removes the cast as dead code if this choice does not win.
    """

    def __init__(self, operands: list[Any], layout: ir.Layout, cast: str, product: list[Any]) -> None:
        how = product[-3:]

        def both(x: Any, b: Any, scale_b: Any, *bias: Any) -> Any:
            return ops.matmul(*ops.cast(x, [cast]), b, scale_b, *(bias or [None]), *how)

        super().__init__(
            name="mx_quantize_then_scaled_mm_0",
            input_nodes=operands,
            layout=layout,
            description="",
            make_fx_graph=make_fx(both),
        )
        self._product = product

    def output_node(self) -> ir.TensorBox:
        """Returns the graph's product node that reads the cast."""
        out: ir.TensorBox = lowerings[ops.matmul](*self._product)
        return out


def _choices(
    operands: list[Any], layout: ir.Layout, form_x: Format, form_b: Format
) -> Iterator[dict[str, Any]]:
    """Yields the template's arguments for each tile."""
    (x, _, scale_b, *_), (m, n) = operands, layout.size
    layouts = [layout, *(operand.get_layout() for operand in operands)]
    target, sizes = of_device(layout.device), V.graph.sizevars
    rows, columns = sizes.optimization_hint(m), sizes.optimization_hint(n)
    # `fused` returns [] if `graph.fuse` did not have the size, or chose for another chip (option `target`)
    tile_sizes = fused(target, rows, columns) or products(target, rows)[:1]
    for swap, tile in tile_sizes:
        yield {
            **blocks(tile, swap=swap),
            "EVEN_N": sizes.statically_known_multiple_of(n, tile.block_m if swap else tile.block_n),
            "EVEN_K": sizes.statically_known_multiple_of(x.get_size()[1], tile.block_k),
            "INDEX": index_type(*(tensor_layout.storage_size() for tensor_layout in layouts)),
            "BIASED": len(operands) > 3,
            "TILED": len(scale_b.get_size()) == 1,
            "WORDS": not target.tmem_columns,
            "DTYPE": triton_type(x.get_dtype()),
            "ELEM_X": repr(form_x.elem.name),
            "ELEM_B": repr(form_b.elem.name),
            "ROUNDING": repr(str(form_x.rounding)),
            "NATIVE": target.encodes_fp8,
        }
