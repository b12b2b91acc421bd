"""follow: give the layers of a part of a model the roles that they have in the whole.

A graph that was cut shows a layer without its surroundings: the last one in sight looks like the head, one
whose activation lies in the next graph like none in particular. The plan has seen the whole. A layer is
found by its name; of one that runs several times, each run counts if all are here, else the first of its
sizes does. What the
plan does not know keeps the role that its surroundings in this graph give.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import fx

from mxcompile.graph.tags import GemmTag, Kind, set_tag, tags_of
from mxcompile.policy import Gemm


@dataclass(frozen=True, kw_only=True, slots=True)
class Follow:
    """Options: `known`, the forward GEMMs of the whole model by name."""

    name: ClassVar[str] = "follow"
    known: Mapping[str, tuple[GemmTag, ...]] = field(default_factory=dict)

    def apply(self, graph: fx.Graph) -> None:
        """Set role and whole layer in the tags of `graph`."""
        forward: defaultdict[tuple[str, Kind], list[GemmTag]] = defaultdict(list)
        for node in graph.nodes:
            for tag in tags_of(node)[:1]:
                if tag.gemm is Gemm.FPROP and tag.layer == node.name:
                    forward[tag.name, tag.kind].append(tag)
        found: dict[str, GemmTag | None] = {}
        for (name, kind), here in forward.items():
            there = [tag for tag in self.known.get(name, ()) if tag.kind is kind]
            found |= dict(zip((tag.layer for tag in here), _matched(here, there), strict=True))
        for node in graph.nodes:
            tags = tags_of(node)
            if tags and tags[0].kind in (Kind.LINEAR, Kind.PRODUCT):
                set_tag(node, *(_following(tag, found.get(tag.layer)) for tag in tags))


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
