"""Inductor template of ``mx.scaled_mm`` on tiled scales: persistent, loads by the tensor memory accelerator.

    acc[m, n] = Σ_k a[m, k] · 2^(sa[m, k/32] − 127) · b[k, n] · 2^(sb[k/32, n] − 127)  (+ bias[n])    in FP32
    out       = epilogue(round(acc))              activation, residual, gate, cast: Inductor's own, fused

The kernel of ``lowering.kernels.scaled_mm_tiled`` with descriptors made on the device, from plain pointers,
so that it is called like any other. A program per multiprocessor walks over the tiles of the result, each
stored in 2^HALVINGS parts of its columns, which bounds the registers that an epilogue takes. The accelerator
fills what lies outside with zeros.

Wants what `fits` says; the pointer form of ``templates.scaled_mm`` takes the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._inductor.kernel.mm_common import persistent_mm_grid
from torch._inductor.select_algorithm import TritonTemplate, TritonTemplateKernel
from torch._inductor.utils import get_num_sms
from torch._inductor.virtualized import V

from mxcompile.lowering.kernels import scratch
from mxcompile.lowering.kernels.configs import TiledConfig
from mxcompile.lowering.templates import configs

_SOURCE = r"""
from mxcompile.lowering.kernels import scale_bytes, scaled_mm, scaled_mm_tiled

{% if BIASED %}
{{def_kernel("A", "SA", "B", "SB", "BIAS")}}
{% else %}
{{def_kernel("A", "SA", "B", "SB")}}
{% endif %}
    M = {{size("A", 0)}}
    N = {{size("B", 1)}}
    K = {{size("A", 1)}}
{% if A_K_MAJOR %}
    a_desc = tl.make_tensor_descriptor(A, [M, K], [{{stride("A", 0)}}, 1], [BLOCK_M, BLOCK_K])
{% else %}
    a_desc = tl.make_tensor_descriptor(A, [K, M], [{{stride("A", 1)}}, 1], [BLOCK_K, BLOCK_M])
{% endif %}
{% if B_K_MAJOR %}
    b_desc = tl.make_tensor_descriptor(B, [N, K], [{{stride("B", 1)}}, 1], [BLOCK_N, BLOCK_K])
{% else %}
    b_desc = tl.make_tensor_descriptor(B, [K, N], [{{stride("B", 0)}}, 1], [BLOCK_K, BLOCK_N])
{% endif %}
    sa_desc = scale_bytes.tiled_descriptor(SA, M, K, BLOCK_M, BLOCK_K // 32)
    sb_desc = scale_bytes.tiled_descriptor(SB, N, K, BLOCK_N, BLOCK_K // 32)
    WIDTH: tl.constexpr = BLOCK_N // 2**HALVINGS
    num_tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    steps = tl.cast(tl.cdiv(K, BLOCK_K), tl.int32)
    for tile in tl.range(tl.program_id(0), num_tiles, NUM_SMS, warp_specialize=WARP_SPECIALIZE):
        pid_m, pid_n = scaled_mm.tile_of(tile, M, N, BLOCK_M, BLOCK_N)
        pid_m, pid_n = pid_m.to(tl.int32), pid_n.to(tl.int32)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(steps):
{% if A_K_MAJOR %}
            a = a_desc.load([pid_m * BLOCK_M, step * BLOCK_K])
{% else %}
            a = a_desc.load([step * BLOCK_K, pid_m * BLOCK_M]).T
{% endif %}
{% if B_K_MAJOR %}
            b = b_desc.load([pid_n * BLOCK_N, step * BLOCK_K]).T
{% else %}
            b = b_desc.load([step * BLOCK_K, pid_n * BLOCK_N])
{% endif %}
            sa = scaled_mm_tiled.load_scale(sa_desc, pid_m, step, BLOCK_M, BLOCK_K // 32)
            sb = scaled_mm_tiled.load_scale(sb_desc, pid_n, step, BLOCK_N, BLOCK_K // 32)
            acc = tl.dot_scaled(a, sa, ELEM_A, b, sb, ELEM_B, acc)
        parts = scaled_mm_tiled.columns_of(acc, HALVINGS)
        for part in tl.static_range(2**HALVINGS):
            rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
            rn = pid_n * BLOCK_N + part * WIDTH + tl.arange(0, WIDTH)
            idx_m = rm[:, None].to(INDEX_DTYPE)
            idx_n = rn[None, :]
            mask = (idx_m < M) & (idx_n < N)
            columns = parts[part]
{% if BIASED %}
            columns += tl.load(BIAS + idx_n, mask=idx_n < N, other=0.0).to(tl.float32)
{% endif %}
            {{store_output(("idx_m", "idx_n"), "columns", "mask", indent_width=12,
                           val_shape=("BLOCK_M", "WIDTH"))}}
"""


class _Kernel(TritonTemplateKernel):
    """A kernel that makes descriptors, whose launch needs an allocator in the context it runs in."""

    def call_kernel(self, *args: Any, **keywords: Any) -> None:
        """Write the launch, with the allocator provided in front; the C++ wrapper brings its own."""
        if not V.graph.cpp_wrapper:
            V.graph.wrapper_code.add_import_once(f"from {scratch.__name__} import provide as provide_scratch")
            V.graph.wrapper_code.writeline("provide_scratch()")
        super().call_kernel(*args, **keywords)


class Descriptors(TritonTemplate):
    """A template whose kernel makes descriptors on the device."""

    kernel_type = _Kernel


TEMPLATE = Descriptors(name="mx_scaled_mm_tiled", grid=persistent_mm_grid, source=_SOURCE)


def fits(operands: Sequence[Any]) -> bool:
    """Whether this form can run the product: tiled scales, and operands that the accelerator can read.

    operands: a [M, K], its scale, b [K, N], its scale, and the bias if there is one.
    """
    a, scale_a, b, scale_b, *_ = operands
    if any(len(scale.get_size()) != 1 for scale in (scale_a, scale_b)):
        return False
    return all(map(starts_aligned, operands[:4])) and None not in map(_contiguous, (a, b))


def starts_aligned(operand: Any) -> bool:
    """Whether the accelerator can read from where `operand`, realized, starts."""
    if operand.get_name() in V.graph.unaligned_buffers:
        return False
    return bool(V.graph.sizevars.statically_known_multiple_of(operand.get_layout().offset, configs.ALIGNMENT))


def _contiguous(operand: Any) -> int | None:
    return configs.contiguous(operand.get_stride())


def arguments(operands: Sequence[Any], tile: TiledConfig) -> dict[str, Any]:
    """The template's arguments for `tile`, beside those that all forms have."""
    a, _, b, *_ = operands
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "HALVINGS": tile.halvings,
        "WARP_SPECIALIZE": tile.warp_specialize,
        "NUM_SMS": get_num_sms(),
        "A_K_MAJOR": _contiguous(a) == 1,
        "B_K_MAJOR": _contiguous(b) == 0,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
