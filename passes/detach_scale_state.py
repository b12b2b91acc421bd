"""detach_scale_state: weights are themselves again, and know the state of their layer's scales.

    w', slot = tapped(w, state)  →  w,  slot(state)

The backend taps the weights of a graph whose policy has scales that follow from calls before (see
`compiler.calls.delayed_scales`). `quantize_gemms` knows the values of the slots.
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
    """No options."""

    name: ClassVar[str] = "detach_scale_state"

    def apply(self, graph: fx.Graph) -> None:
        """Take the taps out of `graph`."""
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
