"""Inductor template of ``mx.matmul``: Triton's block-scaled dot with a fused epilogue.

    acc[m, n] = Σ_k a[m, k] · 2^(sa[m, k/32] − 127) · b[k, n] · 2^(sb[k/32, n] − 127)  (+ bias[n])    in FP32
    out       = epilogue(round(acc))              activation, residual, gate, cast: Inductor's own, fused

Operands are read in place, without a transposed or swizzled copy: each may be K-major or MN-major, scales
row-major or tiled. Masks make codes and scale bytes past the end of K 0, whatever the memory there holds.
Operands may be packed FP4 (see `coding`); acc is then multiplied by the scales of both tensors. SWAP computes
outᵀ = bᵀ·aᵀ, for few rows on a chip whose MMA needs many rows of A but few columns of B.

`scaled_bmm` has the template for batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.kernel.mm_common import mm_grid
from torch._inductor.lowering import add, expand, to_dtype
from torch._inductor.select_algorithm import TritonTemplate, realize_inputs
from torch._inductor.virtualized import V

from mxcompile.lowering.chips.tiles import MatmulConfig
from mxcompile.lowering.choices import configs, defaults
from mxcompile.lowering.targets import of_device
from mxcompile.lowering.templates import call, examples, scaled_bmm, scaled_mm_tiled, vendor
from mxcompile.lowering.templates.coding import GAIN, HEAD, Coding
from mxcompile.lowering.templates.tile import STORE, blocks, index_type

_SOURCE = (
    r"""
from mxcompile.lowering.kernels import scale_bytes, scaled_tile
"""
    + HEAD.replace("OTHERS", "[]")
    + r"""
    M = {{size("A", 0)}}
    N = {{size("B", 1)}}
    K = {{size("A", 1)}}
    blocks_k = (K + BLOCK - 1) // BLOCK
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    group = pid // (GROUP_M * tiles_n)
    rows = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    pid_m = group * GROUP_M + pid % (GROUP_M * tiles_n) % rows
    pid_n = pid % (GROUP_M * tiles_n) // rows
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tl.arange(0, BLOCK_K)
    rs = tl.arange(0, BLOCK_K // BLOCK)
    in_m = rm[:, None] < M
    in_n = rn[None, :] < N
    a_ptrs = A + rm[:, None].to(INDEX) * {{stride("A", 0)}} + rk[None, :].to(INDEX) * {{stride("A", 1)}}
    b_ptrs = B + rk[:, None].to(INDEX) * {{stride("B", 0)}} + rn[None, :].to(INDEX) * {{stride("B", 1)}}
{% if not TILED_A %}
    sa_ptrs = scale_bytes.typed(SA, BLOCK)
    sa_ptrs += rm[:, None].to(INDEX) * {{stride("SA", 0)}} + rs[None, :].to(INDEX) * {{stride("SA", 1)}}
{% endif %}
{% if not TILED_B %}
    sb_ptrs = scale_bytes.typed(SB, BLOCK)
    sb_ptrs += rn[:, None].to(INDEX) * {{stride("SB", 1)}} + rs[None, :].to(INDEX) * {{stride("SB", 0)}}
{% endif %}
    acc = tl.zeros({{"(BLOCK_N, BLOCK_M)" if SWAP else "(BLOCK_M, BLOCK_N)"}}, dtype=tl.float32)
    for start in range(0, tl.cdiv(K, BLOCK_K)):
{% if EVEN_K %}
        a = tl.load(a_ptrs{{"" if EVEN_M else ", mask=in_m, other=0.0"}})
        b = tl.load(b_ptrs{{"" if EVEN_N else ", mask=in_n, other=0.0"}})
{% else %}
        in_k = start * BLOCK_K + rk < K
        a = tl.load(a_ptrs, mask=in_m & in_k[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=in_k[:, None] & in_n, other=0.0)
{% endif %}
{% if not EVEN_K and not (TILED_A and TILED_B) %}
        in_block = (start * (BLOCK_K // BLOCK) + rs < blocks_k)[None, :]
{% endif %}
{% if TILED_A %}
        sa = scale_bytes.load_tiled(
            SA, pid_m * BLOCK_M, start, M, K, BLOCK_M, BLOCK_K // BLOCK, EVEN_M and EVEN_K, WORDS, BLOCK)
{% elif EVEN_M and EVEN_K %}
        sa = tl.load(sa_ptrs)
{% else %}
        sa = tl.load(sa_ptrs, mask=in_m{% if not EVEN_K %} & in_block{% endif %}, other=0.0)
{% endif %}
{% if TILED_B %}
        sb = scale_bytes.load_tiled(
            SB, pid_n * BLOCK_N, start, N, K, BLOCK_N, BLOCK_K // BLOCK, EVEN_N and EVEN_K, WORDS, BLOCK)
{% elif EVEN_N and EVEN_K %}
        sb = tl.load(sb_ptrs)
{% else %}
        sb = tl.load(sb_ptrs, mask=(rn[:, None] < N){% if not EVEN_K %} & in_block{% endif %}, other=0.0)
{% endif %}
{% if SWAP %}
        acc = tl.dot_scaled(b.T, sb, ELEM_B, a.T, sa, ELEM_A, acc)
{% else %}
        acc = tl.dot_scaled(a, sa, ELEM_A, b, sb, ELEM_B, acc)
{% endif %}
        a_ptrs += BLOCK_K * {{stride("A", 1)}}
        b_ptrs += BLOCK_K * {{stride("B", 0)}}
{% if not TILED_A %}
        sa_ptrs += (BLOCK_K // BLOCK) * {{stride("SA", 1)}}
{% endif %}
{% if not TILED_B %}
        sb_ptrs += (BLOCK_K // BLOCK) * {{stride("SB", 0)}}
{% endif %}
    end_m = M
{% if SWAP %}
    idx_m = rm[None, :].to(INDEX_DTYPE)
    idx_n = rn[:, None].to(INDEX_DTYPE)
{% else %}
    idx_m = rm[:, None].to(INDEX_DTYPE)
    idx_n = rn[None, :].to(INDEX_DTYPE)
{% endif %}
    mask = (idx_m < M) & (idx_n < N)
"""
    + GAIN.replace("ACC", "acc")
    + r"""
{% if BIASED %}
    acc += tl.load(BIAS + idx_n, mask=idx_n < N, other=0.0).to(tl.float32)
{% endif %}
"""
    + STORE.replace("INDICES", '("idx_m", "idx_n")')
)


class _Product(TritonTemplate):
    kernel_type = examples.ProductKernel


TEMPLATE = _Product(name="mx_scaled_mm", grid=mm_grid, source=_SOURCE)

_GROUP_M = 8


def lower_matmul(
    a: ir.TensorBox,
    scale_a: ir.TensorBox,
    b: ir.TensorBox,
    scale_b: ir.TensorBox,
    bias: ir.TensorBox | None,
    out_dtype: torch.dtype,
    format_a: str,
    format_b: str,
    tensors: Sequence[ir.TensorBox] | None = None,
) -> ir.TensorBox | None:
    """Returns a [M, K] · b [K, N] (+ bias), or a batch of products, that `graph.native` left; None on CPU."""
    if a.get_device_or_error().type == "cpu":
        return None
    size = [*a.get_size()[:-1], b.get_size()[-1]]
    return lower(
        [a, scale_a, b, scale_b], bias, out_dtype, Coding.from_operands(a, b, format_a, tensors, size)
    )


def lower(
    sides: list[ir.TensorBox], bias: ir.TensorBox | None, out_dtype: torch.dtype, coding: Coding
) -> ir.TensorBox:
    """Returns the product a [M, K] · b [K, N] (+ bias) of operands in `coding`, or a batch of products.

    sides: a, its scale, b, its scale.
    """
    a, _, b, _ = sides
    if len(a.get_size()) == 3:
        return scaled_bmm.lower(sides, bias, out_dtype, coding)
    m, n = a.get_size()[0], b.get_size()[1]
    operands = [*map(realize_inputs, sides), *coding.tensors]
    biased = bias is not None
    if bias is not None and len(bias.get_size()) == 1:
        operands.append(realize_inputs(expand(bias, [n])))
    elif bias is not None:  # a bias for each element: Inductor adds it
        wide = lower(sides, None, torch.float32, coding)
        total: ir.TensorBox = to_dtype(add(wide, bias), out_dtype)
        return total
    layout = ir.FixedLayout(a.get_device_or_error(), out_dtype, [m, n])
    tried = _choices(operands, layout, coding, biased=biased)
    return call.best("mx_scaled_mm", operands, layout, tried, examples=examples.dense(coding))


def _choices(
    operands: list[Any], layout: ir.Layout, coding: Coding, *, biased: bool
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields the choices with their arguments; unless autotuning, only the form of `defaults`."""
    m, n, k = map(V.graph.sizevars.optimization_hint, (*layout.size, operands[0].get_size()[1]))
    shared = {**coding.arguments, "BIASED": biased}
    target = of_device(layout.device)
    tiled = configs.tiled_products(target, m, n, k) if scaled_mm_tiled.fits(operands) else []
    library = vendor.choice(operands, layout.dtype, target, coding, biased=biased)
    tried = defaults.ALL
    if not configs.autotuning():
        form = coding.default_form(defaults.DENSE, (m, n, k), tiled, target, library=library is not None)
        tried, tiled = frozenset({form}), defaults.tile_of(form, tiled)
    for config in tiled:
        yield scaled_mm_tiled.TEMPLATE, {**shared, **scaled_mm_tiled.arguments(operands, config)}
    if defaults.POINTERS in tried:
        for swap, tile in configs.products(target, m, gathered=_gathered(operands)):
            arguments = _arguments(operands, layout, tile, swap=swap)
            yield TEMPLATE, {**shared, **arguments, "WORDS": not target.tmem_columns}
    if defaults.VENDOR in tried and library is not None:
        yield library


def _arguments(operands: list[Any], layout: ir.Layout, tile: MatmulConfig, *, swap: bool) -> dict[str, Any]:
    """Returns the template's arguments for a tile, except arguments that all forms share."""
    (m, n), k = layout.size, operands[0].get_size()[1]
    known_multiple = V.graph.sizevars.statically_known_multiple_of
    return {
        **blocks(tile, swap=swap, GROUP_M=_GROUP_M),
        "EVEN_M": known_multiple(m, tile.block_n if swap else tile.block_m),
        "EVEN_N": known_multiple(n, tile.block_m if swap else tile.block_n),
        "EVEN_K": known_multiple(k, tile.block_k),
        "INDEX": index_type(*(operand.get_layout().storage_size() for operand in operands)),
        "TILED_A": len(operands[1].get_size()) == 1,
        "TILED_B": len(operands[3].get_size()) == 1,
    }


def _gathered(operands: list[Any]) -> bool:
    """Whether an operand is read byte by byte, because its rows may start at any byte."""
    known_multiple = V.graph.sizevars.statically_known_multiple_of
    strides = [stride for operand in (operands[0], operands[2]) for stride in operand.get_stride()]
    return not all(stride == 1 or known_multiple(stride, configs.WORD) for stride in strides)
