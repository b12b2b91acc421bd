"""bodies: tag the products in the graphs that an operator of higher order calls, on the node that calls them.

    cond(pred, {y = x·aᵀ}, {y = x·bᵀ}, (x, a, b))   →   the tags of a and b, on the node of cond

No pass rewrites a body; the record gives that as its reason. If a body has products, `find` and `classify`
run on the graph with its bodies inlined (see `graph.bodies`), so that a layer in a branch gets the name and
the role that it would have without the condition. A product counts once per run of its body, if shapes give
that number: once for each slice of a scan, once in each branch of a condition, once in a loop.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from mxcompile.graph.bodies import CALLS_KEY, OWNER_KEY, flattened, hides_products
from mxcompile.graph.tags import GemmTag, Kind, set_tag, size_or_none, tags_of
from mxcompile.passes.classify import Classify
from mxcompile.passes.find import Find, number
from mxcompile.passes.split import Split
from mxcompile.policy import Gemm


@dataclass(frozen=True, kw_only=True, slots=True)
class Bodies:
    """Tags products in bodies. find, classify: the passes that tagged the graph without its bodies."""

    name: ClassVar[str] = "bodies"
    find: Find
    classify: Classify

    def apply(self, graph: fx.Graph) -> None:
        """Tags all nodes of `graph` again, and the products in their bodies, if a body contains a product."""
        readers = (user for read in graph.find_nodes(op="get_attr") for user in read.users)
        if not any(map(hides_products, readers)):
            return
        flat = flattened(graph)
        for step in (Split(), self.find, self.classify):
            step.apply(flat)
        names = {node.name: _name(node) for node in flat.nodes}
        firsts: dict[tuple[object, ...], GemmTag] = {}
        layers: dict[str, GemmTag] = {}
        tags: defaultdict[fx.Node, list[GemmTag]] = defaultdict(list)
        for node in flat.nodes:
            for tag in tags_of(node):
                if tag.gemm is Gemm.FPROP:  # backward may run the layer again: the first run gives its role
                    layers[tag.layer] = firsts.setdefault((tag.name, tag.n, tag.k), tag)
                first = layers.get(tag.layer, tag)
                tag = replace(tag, layer=names[tag.layer], role=first.role, evidence=first.evidence)
                tags[node.meta[OWNER_KEY]].append(_hidden(tag, node) if CALLS_KEY in node.meta else tag)
        for owner, of_owner in tags.items():
            set_tag(owner, *of_owner)
        number(graph.nodes)


def _name(node: fx.Node) -> str:
    """Returns the name of the layer of `node`, a node of a flattened graph."""
    if (owner := node.meta.get(OWNER_KEY)) is None:
        return node.name
    return f"{owner.name}.{node.name}" if CALLS_KEY in node.meta else owner.name


def _hidden(tag: GemmTag, node: fx.Node) -> GemmTag:
    """Returns the tag of `node`, a product in a body, for the node that calls the body."""
    calls = size_or_none(node.meta[CALLS_KEY])
    return replace(
        tag,
        kind=Kind.OPAQUE,
        tensors=tag.tensors if tag.is_layer else ("x", "x"),
        batch=None if calls is None or tag.batch is None else calls * tag.batch,
    )
