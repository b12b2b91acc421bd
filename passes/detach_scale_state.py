"""detach_scale_state: separate each weight from the state of its layer's delayed scales.

    w', slot = tapped(w, state)  →  w,  slot(state)

If the policy has delayed scales, the backend adds `mx.tapped` to the weights of a graph (see
`compiler.calls.delayed_scales`). This pass writes the state into the metadata of the weight, where
`quantize_gemms` finds it; `quantize_gemms` fills the slots.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from mxcompile import ops
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import argument
from mxcompile.graph.tags import STATE_KEY
from mxcompile.passes.delayed_scales import FORWARD


@dataclass(frozen=True, kw_only=True, slots=True)
class DetachScaleState:
    """Removes `mx.tapped` between weights and the state of delayed scales."""

    name: ClassVar[str] = "detach_scale_state"

    def apply(self, graph: fx.Graph) -> None:
        """Removes the operators `mx.tapped` from `graph`."""
        build = Builder(graph, self.name)
        for node in graph.find_nodes(op="call_function", target=ops.tapped):
            weight, state = argument(node, 0), argument(node, 1)
            weight.meta[STATE_KEY] = state
            for result in list(node.users):
                if result.target is operator.getitem and result.args[1] == 0:
                    build.replace(result, weight)
                    continue
                with graph.inserting_before(result):
                    slot = build.call(ops.slot, state, like=node)
                slot.meta[FORWARD] = True
                build.replace(result, slot)
            graph.erase_node(node)
