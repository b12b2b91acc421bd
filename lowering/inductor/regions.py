"""regions: name the layer and the GEMM of each product in traces of PyTorch's profiler.

    region = record_function("model.layers.3.mlp.down_proj dgrad")
    the kernel of the product, with what is fused to it
    region = None

Regions are lines of the code that Inductor generates, so a setting of Inductor enables them. Kernels keep
their names, because equal layers share a kernel. Blocks that are compiled one by one share code too, and its
regions have the names of the first block. C++ wrapper code has no regions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch._inductor.scheduler import BaseSchedulerNode
from torch._inductor.virtualized import V

from mxcompile.graph.tags import tags_of
from mxcompile.lowering.inductor.scheduling import Nodes, SchedulerPass

_REGION = "mx_region"


class Regions(SchedulerPass):
    """Writes the beginning and the end of a region around each kernel of a product."""

    def apply(self, nodes: Nodes) -> Nodes:
        """Makes Inductor's wrapper code open and close regions. Returns `nodes` unchanged."""
        if not V.graph.cpp_wrapper:
            wrapper: Any = V.graph.wrapper_code
            wrapper.enter_context = _entering(wrapper, dict(map(_labelled, nodes)))
        return nodes


def _labelled(group: BaseSchedulerNode) -> tuple[fx.Node | None, str]:
    """Returns the last node of `group`, which Inductor passes to `enter_context`, and the products' names."""
    origins = {
        origin for node in group.get_nodes() if node.node is not None for origin in node.node.get_origins()
    }
    tags = {tag.index: f"{tag.name} {tag.gemm}" for origin in origins for tag in tags_of(origin)}
    return max(origins, default=None), " + ".join(tags[index] for index in sorted(tags))


def _entering(wrapper: Any, labels: dict[fx.Node | None, str]) -> Callable[[fx.Node], None]:
    """Returns a version of `wrapper.enter_context`, called before each group, which also writes regions."""
    enter, is_open = wrapper.enter_context, False

    def entering(last: fx.Node) -> None:
        nonlocal is_open
        enter(last)
        if is_open:
            wrapper.writeline(f"{_REGION} = None")  # a region ends when its object is deleted
        is_open = bool(labels.get(last))
        if is_open:
            wrapper.writeline(
                f"{_REGION} = torch.ops.profiler._record_function_enter_new({labels[last]!r}, None)"
            )

    return entering
