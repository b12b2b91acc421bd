"""flatten: hand scales over tokens from forward to backward as vectors, where the token count is symbolic.

    saved scale[⌈t/32⌉, k]  →  forward: viewed as [⌈t/32⌉·k] and saved; backward: viewed as [⌈t/32⌉, k]

Inductor asks of every output whether a dimension has length one, and guards on the answer. ⌈t/32⌉ has it for
up to 32 tokens, so that what was compiled for more would be compiled again for fewer; ⌈t/32⌉·k never has it.
Scales with a second symbolic dimension are left: its length would have to be saved too. Runs on the
partitioned graphs, where the two ends of what is saved have one name.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from mxcompile import ops
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import argument, aten, packet
from mxcompile.graph.tags import PASS_KEY, tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Flatten:
    """num_outputs: the model's own outputs, which come first in a forward graph."""

    name: ClassVar[str] = "flatten"
    num_outputs: int

    def apply(self, forward: fx.Graph, backward: fx.Graph) -> bool:
        """Flatten what `forward` saves, and take it as that in `backward`. Returns whether there was any."""
        (outputs,) = forward.find_nodes(op="output")
        inputs = {node.name: node for node in backward.find_nodes(op="placeholder")}
        (returned,) = outputs.args
        assert isinstance(returned, list | tuple)
        results = list(returned)
        for index, saved in enumerate(results[self.num_outputs :], self.num_outputs):
            if isinstance(saved, fx.Node) and saved.name in inputs and _is_symbolic_scale(saved):
                build = Builder(forward, self.name)
                with forward.inserting_before(outputs):
                    flat = build.call(ops.flatten, saved, like=saved)
                results[index] = flat
                self._take(backward, inputs[saved.name], flat.meta["val"])
        outputs.args = (tuple(results),)
        return results != list(returned)

    def _take(self, graph: fx.Graph, vector: fx.Node, value: Any) -> None:
        """Make the input `vector` of `graph` one with `value`; its users go on reading the matrix it was."""
        shape = [size if isinstance(size, int) else -1 for size in vector.meta["val"].shape]
        with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
            matrix = graph.call_function(aten.view.default, (vector, shape))
        matrix.meta = {**vector.meta, PASS_KEY: self.name}
        vector.replace_all_uses_with(matrix, delete_user_cb=lambda user: user is not matrix)
        vector.meta["val"] = value


def _is_symbolic_scale(node: fx.Node) -> bool:
    """Whether `node` is a cast's scale of which just one size is symbolic."""
    value = tensor(node)
    if packet(node) is not operator.getitem or packet(argument(node)) not in ops.CASTS or value is None:
        return False
    symbolic = [size for size in value.shape if not isinstance(size, int)]
    return value.dtype in (torch.uint8, torch.float32) and value.ndim > 1 and len(symbolic) == 1
