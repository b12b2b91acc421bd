"""Positions of the nodes of a picture: a layered drawing of an outline, from top to bottom.

    rows      longest path from the top; a block starts below all earlier blocks
    order     nodes of a row sorted by the mean position of their neighbours, swept down and up (Sugiyama)
    columns   as near to the neighbours as widths and order allow

An edge that spans rows gets a waypoint in each of them, which keeps space free for the line. The initial
order is the flow's. Edges that lead back are ignored.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import networkx as nx

from mxcompile.report.data.fold import grouped
from mxcompile.report.data.outline import Outline, OutlineNode, inner_block

GAP = 22.0
ROW_GAP = 30.0
_SWEEPS = 8
_PULL = 0.97
"""Factor on all x in every sweep, which pulls nodes to x = 0. Without it long graphs drift sideways."""
_Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """Centre and size of a node, in px."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A drawing, in px.

    boxes: box of each node, by index in the outline. lines: points of each edge, from box to box. width,
    height: size of the whole drawing.
    """

    boxes: dict[int, Box]
    lines: dict[tuple[int, int], tuple[_Point, ...]]
    width: float
    height: float


def lay_out(outline: Outline, chosen: Sequence[int], sizes: dict[int, tuple[float, float]]) -> Layout:
    """Returns the layout of the nodes `chosen` by index, at least one. sizes: widths and heights, in px."""
    edges = [(a, b) for a, b in outline.edges if a < b and a in sizes and b in sizes]
    rows = _rows(outline.nodes, chosen, edges)
    flow, chains = _with_waypoints(edges, rows)
    widths: dict[int, float] = {node: sizes[node][0] if node in sizes else 6.0 for node in flow}
    columns = _columns(flow, chains.values(), widths)
    left = min(columns[n] - widths[n] / 2 for n in flow)
    right = max(columns[n] + widths[n] / 2 for n in flow)
    heights = [
        max(sizes[node][1] for node in row) for _, row in sorted(grouped(chosen, rows.__getitem__).items())
    ]
    tops = [0.0, *itertools.accumulate(height + ROW_GAP for height in heights)]
    boxes = {}
    for node in chosen:
        width, height = sizes[node]
        y = tops[rows[node]] + heights[rows[node]] / 2
        boxes[node] = Box(x=columns[node] - left, y=y, width=width, height=height)
    lines: dict[tuple[int, int], tuple[_Point, ...]] = {}
    for (a, b), chain in chains.items():
        points = [(boxes[a].x, boxes[a].y + boxes[a].height / 2)]
        for waypoint in chain:
            x, row = columns[waypoint] - left, flow.nodes[waypoint]["row"]
            points += [(x, tops[row]), (x, tops[row] + heights[row])]
        lines[a, b] = (*points, (boxes[b].x, boxes[b].y - boxes[b].height / 2))
    return Layout(boxes=boxes, lines=lines, width=right - left, height=tops[-1] - ROW_GAP)


def _rows(
    nodes: Sequence[OutlineNode], chosen: Sequence[int], edges: Sequence[tuple[int, int]]
) -> dict[int, int]:
    before: defaultdict[int, list[int]] = defaultdict(list)
    for a, b in edges:
        before[b].append(a)
    rows: dict[int, int] = {}
    starts: dict[str, int] = {}
    current, deepest = None, -1
    for node in chosen:
        block = inner_block(nodes[node].names[0])
        if block != current and (block not in starts or not block):
            starts[block] = deepest + 1
        current = block
        rows[node] = max([starts[block], *(rows[a] + 1 for a in before[node])])
        deepest = max(deepest, rows[node])
    return rows


def _with_waypoints(
    edges: Sequence[tuple[int, int]], rows: dict[int, int]
) -> tuple[nx.DiGraph[int], dict[tuple[int, int], list[int]]]:
    """Returns the graph with a waypoint in every row that an edge crosses, and the waypoints of each edge."""
    flow: nx.DiGraph[int] = nx.DiGraph()
    flow.add_nodes_from((node, {"row": row}) for node, row in rows.items())
    chains: dict[tuple[int, int], list[int]] = {}
    fresh = itertools.count(max(rows) + 1)
    for a, b in edges:
        crossed = {next(fresh): {"row": row} for row in range(rows[a] + 1, rows[b])}
        flow.add_nodes_from(crossed.items())
        nx.add_path(flow, [a, *crossed, b])
        chains[a, b] = [*crossed]
    return flow, chains


def _columns(
    flow: nx.DiGraph[int], chains: Collection[Sequence[int]], widths: dict[int, float]
) -> dict[int, float]:
    """Returns the x of every node's centre. The last sweeps align the waypoints of each edge vertically."""
    order = [row for _, row in sorted(grouped(flow, lambda node: flow.nodes[node]["row"]).items())]
    x = {node: float(position) for row in order for position, node in enumerate(row)}
    for sweep in range(_SWEEPS):
        for row in order if sweep % 2 == 0 else reversed(order):
            near = flow.pred if sweep % 2 == 0 else flow.succ
            wanted = {n: _mean([x[m] for m in near[n]], x[n]) for n in row}
            row.sort(key=wanted.__getitem__)
            x.update({node: float(position) for position, node in enumerate(row)})
    for row in order:
        x.update(_packed(row, dict.fromkeys(row, 0.0), widths))
    for sweep in range(4 * _SWEEPS):
        straight = {w: _mean([x[v] for v in chain], 0.0) for chain in chains for w in chain}
        for row in order if sweep % 2 == 0 else reversed(order):
            wanted = {
                n: straight[n]
                if n in straight and sweep > 2 * _SWEEPS
                else _PULL * _mean([x[m] for m in (*flow.pred[n], *flow.succ[n])], x[n])
                for n in row
            }
            x.update(_packed(row, wanted, widths))
    return x


def _mean(values: list[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _packed(row: list[int], wanted: dict[int, float], widths: dict[int, float]) -> dict[int, float]:
    """Returns positions in the order of `row` without overlap, with least squared distance from `wanted`.

    Neighbours that would overlap move as a group, to the mean of their wanted positions (isotonic
    regression).
    """
    steps = ((widths[a] + widths[b]) / 2 + GAP for a, b in itertools.pairwise(row))
    offsets = dict(zip(row, itertools.accumulate(steps, initial=0.0), strict=True))
    groups: list[tuple[float, list[int]]] = []
    for node in row:
        groups.append((wanted[node] - offsets[node], [node]))
        while len(groups) > 1 and groups[-2][0] > groups[-1][0]:
            (x, members), (y, others) = groups[-2], groups[-1]
            size = len(members) + len(others)
            groups[-2:] = [((x * len(members) + y * len(others)) / size, members + others)]
    return {node: x + offsets[node] for x, members in groups for node in members}
