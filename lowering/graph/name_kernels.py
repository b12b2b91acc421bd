"""name_kernels: name PyTorch's operator, with reasons, in the tags of products without a kernel."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from mxcompile.graph.opsets import called_packet
from mxcompile.graph.tags import set_tag, tags_of
from mxcompile.lowering.graph.lowering_pass import LoweringPass


class NameKernels(LoweringPass):
    """Names the operators of products without a kernel, on all targets, after passes that choose kernels."""

    def apply(self, graph: fx.Graph) -> None:
        """Names the operator in the tags of products without a kernel."""
        for node in graph.nodes:
            tags = tags_of(node)
            if tags and not tags[0].kernel:
                kernel = tags[0].with_fallbacks(str(called_packet(node)))
                set_tag(node, *(replace(tag, kernel=kernel) for tag in tags))
