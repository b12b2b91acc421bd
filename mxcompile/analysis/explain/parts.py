"""Records that no captured graph contains: for code that several layers share, and for uncompiled code."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from torch import fx

from mxcompile.formats import KEPT
from mxcompile.graph.opsets import packet
from mxcompile.graph.tags import GemmTag, gradient_tags, set_tag, tags_of
from mxcompile.models.blocks import Blocks
from mxcompile.models.names import joined
from mxcompile.passes.apply_plan import ApplyPlan
from mxcompile.passes.classify import Classify
from mxcompile.passes.find import Find
from mxcompile.passes.record import record_of, records
from mxcompile.plan.plan import Layers
from mxcompile.policy import Choice, Code, Reason
from mxcompile.report import GemmRecord


def moved(gemms: Iterable[GemmRecord], first: Sequence[str], now: Sequence[str]) -> tuple[GemmRecord, ...]:
    """Returns `gemms` of a graph with parameters at the paths `first` for a call with parameters at `now`."""
    heads: dict[str, str] = {}
    for before, after in zip(first, now, strict=True):
        if before and after and before != after:
            old, new = _differing(before, after)
            heads[old] = new
    return tuple(dataclasses.replace(gemm, name=_renamed(gemm.name, heads)) for gemm in gemms)


def _differing(before: str, after: str) -> tuple[str, str]:
    """Returns both paths without their common suffix."""
    old, new = before.split("."), after.split(".")
    while old and new and old[-1] == new[-1]:
        old.pop()
        new.pop()
    return ".".join(old), ".".join(new)


def _renamed(name: str, heads: dict[str, str]) -> str:
    steps = name.split(".")
    for end in range(len(steps), 0, -1):
        head = ".".join(steps[:end])
        if head in heads:
            return joined(heads[head], *steps[end:])
    return name


def eager_records(
    graph: fx.Graph, known: Layers, blocks: Blocks, *, training: bool
) -> tuple[GemmRecord, ...]:
    """Returns records of the products in `graph`, which ran outside of compiled graphs.

    known: GEMMs of the whole model by name, with their roles. blocks: blocks of the model. training: whether
    to include the products of their gradients.
    """
    Find(blocks=blocks).apply(graph)
    Classify(cut_inputs=True, cut_outputs=True).apply(graph)
    ApplyPlan(known=known).apply(graph)
    kept = Choice(precision=KEPT.name, reason=Reason(Code.NOT_COMPILED))
    for node in graph.nodes:
        kernel = str(packet(node))
        set_tag(node, *(dataclasses.replace(tag, choice=kept, kernel=kernel) for tag in tags_of(node)))
    forward = records(graph)
    if not training:
        return forward
    tags = (tag for node in graph.nodes for tag in tags_of(node))
    return tuple(gemm for tag, first in zip(tags, forward, strict=True) for gemm in _step(tag, first))


def _step(tag: GemmTag, fprop: GemmRecord) -> Iterator[GemmRecord]:
    """Yields `fprop` and the products of its gradients, with the names that `find` gives them."""
    yield fprop
    for gradient in gradient_tags(tag):
        yield dataclasses.replace(record_of(gradient), dtype=fprop.dtype)
