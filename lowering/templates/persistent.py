"""Source of persistent templates, whose programs loop over tiles that the tensor memory accelerator loads.

A template makes the descriptors and chooses where each tile begins. `kernels.tma_tile` computes the tile.
`PARTS` splits it into 2^HALVINGS parts of its columns, which bounds the registers of an epilogue. `STORE`
passes each part to Inductor, which adds the epilogue.
"""

from __future__ import annotations

from typing import Any

from torch._inductor.select_algorithm import TritonTemplate
from torch._inductor.utils import get_num_sms
from torch._inductor.virtualized import V

from mxcompile.lowering.chips.tiles import TiledConfig
from mxcompile.lowering.choices import configs
from mxcompile.lowering.kernels import scratch
from mxcompile.lowering.templates.examples import ProductKernel

PARTS = r"""
        parts = tma_tile.columns_of(acc, HALVINGS)
        for part in tl.static_range(2**HALVINGS):
            idx_m = (row + tl.arange(0, BLOCK_M))[:, None].to(INDEX_DTYPE)
            idx_n = (pid_n * BLOCK_N + part * WIDTH + tl.arange(0, WIDTH))[None, :].to(INDEX_DTYPE)
            mask = (idx_m < end_m) & (idx_n < N)
            columns = parts[part]
"""
"""Source: a loop over parts of acc. Reads acc; row, the tile's first row, and end_m; pid_n; N; WIDTH, the
columns of a part. Each iteration defines columns (FP32), idx_m, idx_n and mask for `STORE`."""

STORE = r"""
            {{store_output(INDICES, "columns", "mask", indent_width=12, val_shape=("BLOCK_M", "WIDTH"))}}
"""
"""Source: stores a part. INDICES: name of an index for each dimension of the result."""


class _Kernel(ProductKernel):
    """A kernel that makes descriptors. Its launch needs an allocator in the context that runs it."""

    def call_kernel(self, *args: Any, **keywords: Any) -> None:
        """Writes a call that sets Triton's allocator, then the launch. The C++ wrapper needs no such call."""
        if not V.graph.cpp_wrapper:
            V.graph.wrapper_code.add_import_once(f"from {scratch.__name__} import provide as provide_scratch")
            V.graph.wrapper_code.writeline("provide_scratch()")
        super().call_kernel(*args, **keywords)


class Descriptors(TritonTemplate):
    """A template whose kernel creates TMA descriptors on the device."""

    kernel_type = _Kernel


def starts_aligned(operand: Any) -> bool:
    """Whether `operand`, realized, starts at an address that the accelerator can read."""
    if operand.get_name() in V.graph.unaligned_buffers:
        return False
    return bool(V.graph.sizevars.statically_known_multiple_of(operand.get_layout().offset, configs.ALIGNMENT))


def arguments(tile: TiledConfig) -> dict[str, Any]:
    """Returns the arguments of persistent templates for `tile`."""
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "HALVINGS": tile.halvings,
        "NUM_SMS": get_num_sms(),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
