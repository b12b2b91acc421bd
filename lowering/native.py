"""native: choose the mx GEMMs of a graph that the target's own MX GEMM runs, and leave them in place.

What stays ``mx.scaled_mm`` is lowered by a Triton template whose dot is the chip's block-scaled MMA, one for
matrices and one for batches of them. The others are left to `expand`: grouped products and empty ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from mxcompile import ops
from mxcompile.graph.opsets import packet
from mxcompile.graph.tags import hint, set_tag, tags_of, tensor
from mxcompile.lowering.targets import Target
from mxcompile.lowering.templates.configs import products

_OUTPUTS = frozenset({torch.bfloat16, torch.float16, torch.float32})


@dataclass(frozen=True, kw_only=True, slots=True)
class Native:
    """target: the chip, one with an MX GEMM of its own. device: type of the device that stands for it."""

    target: Target
    device: str
    name: ClassVar[str] = "native"

    def apply(self, graph: fx.Graph) -> None:
        """Name the kernel in the tags of the products that stay."""
        for node in graph.nodes:
            if packet(node) is ops.scaled_mm.overloadpacket and self._runs(node):
                what = "mx_scaled_mm" if tensor(node).ndim == 2 else "mx_scaled_bmm"  # type: ignore[union-attr]
                kernel = f"{what} {self._config(node)} ({self.target.mma})"
                set_tag(node, *(replace(tag, kernel=kernel) for tag in tags_of(node)))

    def _config(self, node: fx.Node) -> str:
        """The tile the template takes, or that Inductor is to choose one."""
        out = tensor(node)
        assert out is not None
        tiles = products(self.target.name, hint(out.shape[-2]))
        if len(tiles) > 1:
            return f"autotuned of {len(tiles)}"
        ((swap, tile),) = tiles
        shape = f"{tile.block_m}x{tile.block_n}x{tile.block_k}"
        return f"{shape} swapped" if swap else shape

    def _runs(self, node: fx.Node) -> bool:
        out, a = tensor(node), tensor(node.args[0])
        if out is None or a is None or out.dtype not in _OUTPUTS:
            return False
        if a.ndim not in (2, 3) or a.device.type != self.device:
            return False
        return all(not isinstance(size, int) or size > 0 for size in (*out.shape, a.shape[-1]))
