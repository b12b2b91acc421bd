"""flatten: save scales of blocks over tokens as vectors, where the number of tokens is symbolic.

    saved scale[⌈t/32⌉, k]  →  forward: viewed as [⌈t/32⌉·k] and saved; backward: viewed as [⌈t/32⌉, k]

Inductor tests whether a dimension of an output has length one, and guards on the result. ⌈t/32⌉ is one for up
to 32 tokens, so code that was compiled for more tokens would be compiled again for fewer; ⌈t/32⌉·k is never
one. Scales with a second symbolic dimension stay as they are: its length would have to be saved too. The pass
runs on the partitioned graphs, where forward's output and backward's input have one name.
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
    """Flattens saved scales. num_outputs: number of the model's own outputs, first in a forward graph."""

    name: ClassVar[str] = "flatten"
    num_outputs: int

    def apply(self, forward: fx.Graph, backward: fx.Graph) -> bool:
        """Flattens scales that `forward` saves, and restores them in `backward`. Returns whether it did."""
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
        """Gives the input `vector` of `graph` the fake `value`; its users read a view of the former shape."""
        shape = [size if isinstance(size, int) else -1 for size in vector.meta["val"].shape]
        with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
            matrix = graph.call_function(aten.view.default, (vector, shape))
        matrix.meta = {**vector.meta, PASS_KEY: self.name}
        vector.replace_all_uses_with(matrix, delete_user_cb=lambda user: user is not matrix)
        vector.meta["val"] = value


def _is_symbolic_scale(node: fx.Node) -> bool:
    """Whether `node` is a cast's scale with exactly one symbolic size."""
    value = tensor(node)
    if packet(node) is not operator.getitem or packet(argument(node)) not in ops.CASTS or value is None:
        return False
    symbolic = [size for size in value.shape if not isinstance(size, int)]
    return value.dtype in (torch.uint8, torch.float32) and value.ndim > 1 and len(symbolic) == 1
