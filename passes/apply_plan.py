"""apply_plan: give the layers of a part of a model the roles that they have in the whole.

    y = x·w, both inputs of this graph   a layer of the module that runs it, where its sizes leave no choice

A graph that was cut shows a layer without its surroundings: the last one in sight looks like the head, one
whose activation lies in the next graph like none in particular. The plan has seen the whole. A layer is found
by its name; of one that runs several times, each run counts if all are here, else the first of its sizes
does. A product whose weight was taken from a parameter in front of the cut (an expert's, from the stack of
all) is found by its module. A layer that the plan does not know keeps the role that its surroundings in this
graph give.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from torch import fx

from mxcompile.graph.tags import GemmTag, Kind, set_tag, tags_of
from mxcompile.policy import Gemm


@dataclass(frozen=True, kw_only=True)
class ApplyPlan:
    """Options: `known`, the forward GEMMs of the whole model by name."""

    name: ClassVar[str] = "apply_plan"
    known: Mapping[str, tuple[GemmTag, ...]] = field(default_factory=dict)

    def apply(self, graph: fx.Graph) -> None:
        """Set role and whole layer in the tags of `graph`."""
        forward: defaultdict[tuple[str, Kind], list[GemmTag]] = defaultdict(list)
        for node in graph.nodes:
            for tag in tags_of(node)[:1]:
                if tag.gemm is Gemm.FPROP and tag.layer == node.name:
                    forward[tag.name, tag.kind].append(tag)
        tags_by_layer: dict[str, GemmTag | None] = {}
        for (name, kind), here in forward.items():
            there = [tag for tag in self.known.get(name, ()) if tag.kind is kind]
            if kind is Kind.PRODUCT and not there:
                tags_by_layer |= {tag.layer: self._of_module(tag) for tag in here}
            else:
                tags_by_layer |= dict(zip((tag.layer for tag in here), _matched(here, there), strict=True))
        for node in graph.nodes:
            tags = tags_of(node)
            if tags and tags[0].kind in (Kind.LINEAR, Kind.PRODUCT):
                set_tag(node, *(_following(tag, tags_by_layer.get(tag.layer)) for tag in tags))

    def _of_module(self, product: GemmTag) -> GemmTag | None:
        """The layer of the module that runs `product` which has its sizes, if all that do have one role."""
        sizes = product.n, product.k
        known = (*self.known.get(product.name, ()), *self._by_module.get(product.name, ()))
        there = [tag for tag in known if tag.kind is Kind.LINEAR and (tag.n, tag.k) == sizes]
        return there[0] if len({tag.role for tag in there}) == 1 else None

    @cached_property
    def _by_module(self) -> Mapping[str, Sequence[GemmTag]]:
        """The GEMMs of the whole model by the path of the module that holds the weight."""
        tags_by_module: defaultdict[str, list[GemmTag]] = defaultdict(list)
        for name, tags in self.known.items():
            tags_by_module[name.rpartition(".")[0]] += tags
        return tags_by_module


def _matched(here: Sequence[GemmTag], there: Sequence[GemmTag]) -> list[GemmTag | None]:
    if len(here) == len(there):
        return list(there)
    return [next((t for t in there if (t.n, t.k) == (h.n, h.k)), there[0] if there else None) for h in here]


def _following(tag: GemmTag, known: GemmTag | None) -> GemmTag:
    if known is not None:
        return replace(
            tag, role=known.role, evidence=known.evidence, module=known.module, whole=(known.n, known.k)
        )
    return tag
