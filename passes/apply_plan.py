"""apply_plan: give the layers of a part of a model the roles that they have in the whole.

    y = x·w with x and w graph inputs  →  the role of the layer with these sizes in the module that runs it

In a cut graph the last layer looks like the head, and a layer whose activation is in the next graph has no
role. The plan was recorded on the whole model. A layer is found by its name. If it runs several times and all
runs are in this graph, they match in order; otherwise the first run of the same sizes matches, or the first
run. A product whose weight was picked from a parameter before the cut (an expert's, from a stack) is
found by its module and sizes. A layer that is not in the plan keeps the role from `classify`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from torch import fx

from mxcompile.graph.tags import GemmTag, Kind, set_tag, tags_of
from mxcompile.policy import Gemm


@dataclass(frozen=True, kw_only=True)
class ApplyPlan:
    """Sets roles from the plan. planned: forward GEMMs of the whole model by name."""

    name: ClassVar[str] = "apply_plan"
    planned: Mapping[str, tuple[GemmTag, ...]]

    def apply(self, graph: fx.Graph) -> None:
        """Sets the role, the evidence and the whole layer's sizes in the tags of `graph`."""
        forward: defaultdict[tuple[str, Kind], list[GemmTag]] = defaultdict(list)
        for node in graph.nodes:
            for tag in tags_of(node)[:1]:
                if tag.layer == node.name and (tag.gemm is Gemm.FPROP or tag.is_layer):
                    forward[tag.name, tag.kind].append(tag)
        tags_by_layer: dict[str, GemmTag | None] = {}
        for (name, kind), local in forward.items():
            layers = [tag for tag in self.planned.get(name, ()) if tag.kind is kind]
            if kind is Kind.PRODUCT and not layers:
                tags_by_layer |= {tag.layer: self._of_module(tag) for tag in local}
            else:
                tags_by_layer |= zip((tag.layer for tag in local), _matched(local, layers), strict=True)
        for node in graph.nodes:
            tags = tags_of(node)
            if tags and tags[0].kind in (Kind.LINEAR, Kind.PRODUCT):
                set_tag(node, *(_following(tag, tags_by_layer.get(tag.layer)) for tag in tags))

    def _of_module(self, product: GemmTag) -> GemmTag | None:
        """Returns a layer with the sizes of `product` in its module, or None if their roles differ."""
        sizes = product.n, product.k
        candidates = (*self.planned.get(product.name, ()), *self._by_module.get(product.name, ()))
        layers = [tag for tag in candidates if tag.kind is Kind.LINEAR and (tag.n, tag.k) == sizes]
        return layers[0] if len({tag.role for tag in layers}) == 1 else None

    @cached_property
    def _by_module(self) -> Mapping[str, Sequence[GemmTag]]:
        """The GEMMs of the whole model by the path of the module that holds the weight."""
        tags_by_module: defaultdict[str, list[GemmTag]] = defaultdict(list)
        for name, tags in self.planned.items():
            tags_by_module[name.rpartition(".")[0]] += tags
        return tags_by_module


def _matched(tags: Sequence[GemmTag], planned: Sequence[GemmTag]) -> list[GemmTag | None]:
    if len(tags) == len(planned):
        return list(planned)
    by_sizes = {(tag.n, tag.k): tag for tag in reversed(planned)}
    return [by_sizes.get((tag.n, tag.k), planned[0] if planned else None) for tag in tags]


def _following(tag: GemmTag, plan: GemmTag | None) -> GemmTag:
    if plan is None:
        return tag
    return replace(tag, role=plan.role, evidence=plan.evidence, module=plan.module, whole=(plan.n, plan.k))
