"""name_kernels: name PyTorch's operator, with reasons, in the tags of products without a kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from mxcompile.graph.opsets import called_packet
from mxcompile.graph.tags import set_tag, tags_of
from mxcompile.lowering.graph.lowering_pass import NO_REASONS, LoweringPass, Reasons


@dataclass(frozen=True, kw_only=True, slots=True)
class NameKernels(LoweringPass):
    """Names the operators of products without a kernel, on all targets, after passes that choose kernels."""

    name: ClassVar[str] = "name_kernels"

    def apply(self, graph: fx.Graph) -> Reasons:
        """Names the operator in the tags of products without a kernel."""
        for node in graph.nodes:
            tags = tags_of(node)
            if tags and not tags[0].kernel:
                kernel = tags[0].with_fallbacks(str(called_packet(node)))
                set_tag(node, *(replace(tag, kernel=kernel) for tag in tags))
        return NO_REASONS
