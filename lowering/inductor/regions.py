"""regions: a trace of PyTorch's profiler names the layer and the GEMM of what a graph runs.

    region = record_function("model.layers.3.mlp.down_proj dgrad")
    the kernel of the product, with what is fused to it
    region = None

Inductor's own setting asks for it, since regions are lines of the code that Inductor generates: code without
the setting has none. Kernels keep their names, for equal layers share one kernel. Blocks that are compiled
one by one share their code too: its regions have the name of the first of them. Code in C++ has no regions.
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
        """`nodes` as they are."""
        if not V.graph.cpp_wrapper:
            wrapper: Any = V.graph.wrapper_code
            wrapper.enter_context = _entering(wrapper, dict(map(_labelled, nodes)))
        return nodes


def _labelled(group: BaseSchedulerNode) -> tuple[fx.Node | None, str]:
    """The last node of the graph that `group` computes, by which Inductor tells groups, and its products."""
    origins = {
        origin for node in group.get_nodes() if node.node is not None for origin in node.node.get_origins()
    }
    tags = {tag.index: f"{tag.name} {tag.gemm}" for origin in origins for tag in tags_of(origin)}
    return max(origins, default=None), " + ".join(tags[index] for index in sorted(tags))


def _entering(wrapper: Any, words: dict[fx.Node | None, str]) -> Callable[[fx.Node], None]:
    """Returns the method of `wrapper` that begins the code of each group, with regions by `words`."""
    enter, is_open = wrapper.enter_context, False

    def entering(last: fx.Node) -> None:
        nonlocal is_open
        enter(last)
        if is_open:
            wrapper.writeline(f"{_REGION} = None")  # a region ends with its object, as at the end of the call
        is_open = bool(words.get(last))
        if is_open:
            wrapper.writeline(
                f"{_REGION} = torch.ops.profiler._record_function_enter_new({words[last]!r}, None)"
            )

    return entering
