"""The part of templates whose programs walk over tiles that the tensor memory accelerator loads.

A template's own part makes the descriptors and chooses, for each tile, where it begins: `kernels.tma_tile`
computes it, `PARTS` takes it apart into 2^HALVINGS parts of its columns, which bounds the registers that an
epilogue takes, and `STORE` hands each to Inductor, with what is fused behind.
"""

from __future__ import annotations

from typing import Any

from torch._inductor.select_algorithm import TritonTemplate
from torch._inductor.utils import get_num_sms
from torch._inductor.virtualized import V

from mxcompile.lowering.chips.tiles import TiledConfig
from mxcompile.lowering.kernels import scratch
from mxcompile.lowering.templates import configs
from mxcompile.lowering.templates.examples import ProductKernel

PARTS = r"""
        parts = tma_tile.columns_of(acc, HALVINGS)
        for part in tl.static_range(2**HALVINGS):
            idx_m = (row + tl.arange(0, BLOCK_M))[:, None].to(INDEX_DTYPE)
            idx_n = (pid_n * BLOCK_N + part * WIDTH + tl.arange(0, WIDTH))[None, :].to(INDEX_DTYPE)
            mask = (idx_m < end_m) & (idx_n < N)
            columns = parts[part]
"""
"""Source. Before it: acc; row, where the tile begins, and end_m; pid_n; N; WIDTH of a part. After it, in its
loop: columns, FP32, and idx_m, idx_n, mask, to store them with."""

STORE = r"""
            {{store_output(INDICES, "columns", "mask", indent_width=12, val_shape=("BLOCK_M", "WIDTH"))}}
"""
"""Source: a part goes where INDICES say, names of an index for each dimension of the result."""


class _Kernel(ProductKernel):
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


def starts_aligned(operand: Any) -> bool:
    """Whether the accelerator can read from where `operand`, realized, starts."""
    if operand.get_name() in V.graph.unaligned_buffers:
        return False
    return bool(V.graph.sizevars.statically_known_multiple_of(operand.get_layout().offset, configs.ALIGNMENT))


def arguments(tile: TiledConfig) -> dict[str, Any]:
    """The arguments of these templates for `tile`."""
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "HALVINGS": tile.halvings,
        "NUM_SMS": get_num_sms(),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
