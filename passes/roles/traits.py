"""Traits of operators, computed once per operator: a bit for each set of `opsets` that contains it."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import fx

from mxcompile.graph import opsets
from mxcompile.graph.opsets import aten, packet
from mxcompile.graph.tags import KEY

LINEAR, VIEW, ACTIVATION, REDUCTION, SOFT, SUM, SELECTION = 1, 2, 4, 8, 16, 32, 64
LOOKUP, SCAN, FACTOR, RANDOMS, CONVOLUTION, CALL, MATMUL = 128, 256, 512, 1024, 2048, 4096, 8192

_SETS = (
    (LINEAR, opsets.LINEAR_OPS),
    (VIEW, opsets.TRANSPARENT),
    (ACTIVATION, opsets.ACTIVATIONS),
    (REDUCTION, opsets.REDUCTIONS),
    (SOFT, opsets.SOFTMAX | {aten.exp}),
    (SUM, opsets.SUMS),
    (SELECTION, opsets.TOP_K),
    (LOOKUP, opsets.LOOKUPS),
    (SCAN, opsets.SCANS),
    (FACTOR, frozenset({aten.mul, aten.div})),
    (RANDOMS, opsets.RANDOM),
    (CONVOLUTION, frozenset({aten.convolution})),
)


def traits_of(nodes: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """Returns the traits of every node's operator, with MATMUL if it is tagged; 0 if it is not a call."""
    by_operator: dict[int, int] = {}
    marks: dict[fx.Node, int] = {}
    for node in nodes:
        if node.op != "call_function":
            marks[node] = 0
            continue
        key = id(node.target)
        if (traits := by_operator.get(key)) is None:
            op = packet(node)
            by_operator[key] = traits = CALL | sum(trait for trait, members in _SETS if op in members)
        marks[node] = traits | MATMUL if KEY in node.meta else traits
    seconds = [node for node in marks if packet(node) is operator.getitem and node.args[1] == 1]
    for source in (second.args[0] for second in seconds if second.users):  # the index of a maximum is a top-1
        if isinstance(source, fx.Node) and source.target is aten.max.dim and source in marks:
            marks[source] |= SELECTION
    return marks
