"""An outline as SVG: matmuls coloured by role, solid if quantized, dashed if BF16; casts as pills.

A frame surrounds each folded block. Colours and fonts come from ``page/page.html``; all text is escaped. The
attribute ``data-node`` of a node is its index in the outline, by which the page shows its details.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from html import escape

from mxcompile.formats import precisions
from mxcompile.report.data.fold import spelled
from mxcompile.report.data.outline import Outline, OutlineNode, inner_block
from mxcompile.report.forms.layout import Box, Layout, lay_out
from mxcompile.report.forms.words import tone

_PAD = 16.0
_MARGIN = 34.0
_TAG = 46.0
_LONGEST = 28


@functools.lru_cache(maxsize=64)  # a report is rendered again whenever one of its graphs is lowered
def picture(outline: Outline, phase: str, key: str) -> str:
    """Returns the nodes of `phase` as one ``<svg>``; "" without nodes. key: suffix that makes ids unique."""
    chosen = [i for i, node in enumerate(outline.nodes) if node.phase == phase]
    if not chosen:
        return ""
    nodes: dict[int, OutlineNode] = {}
    blocks: dict[tuple[str, ...], list[int]] = {}
    for i in chosen:
        nodes[i] = node = outline.nodes[i]
        if node.kind == "cast" and outline.only_backward(i):
            nodes[i] = dataclasses.replace(node, label=f"{node.label} → backward")
        paths = _block_paths(node)
        if paths[0]:
            blocks.setdefault(paths, []).append(i)
    layout = lay_out(outline, chosen, {i: _size(node) for i, node in nodes.items()})
    drawn = [_frame(outline, layout, members) for members in blocks.values() if len(members) > 1]
    for (a, b), points in layout.lines.items():
        path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
        for (x, y), (to_x, to_y) in itertools.pairwise(points):
            half = (y + to_y) / 2
            path += f"C{x:.1f} {half:.1f} {to_x:.1f} {half:.1f} {to_x:.1f} {to_y:.1f}"
        kind = " fp8" if outline.nodes[a].kind == "cast" else ""
        drawn.append(
            f'<path class="edge{kind}" data-edge="{a} {b}" d="{path}" marker-end="url(#arrow-{key})"/>'
        )
    drawn += [_node(node, i, layout.boxes[i]) for i, node in nodes.items()]
    width, height = layout.width + 2 * _MARGIN, layout.height + 2 * _MARGIN
    return (
        f'<svg class="picture" viewBox="{-_MARGIN:.0f} {-_MARGIN:.0f} {width:.0f} {height:.0f}"'
        f' width="{width:.0f}" height="{height:.0f}" style="--width:{width:.0f}px" role="group"'
        f' aria-label="graph, {phase}">'
        f'<defs><marker id="arrow-{key}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
        f' orient="auto"><path d="M0 .5 8 4 0 7.5z" class="tip"/></marker></defs>'
        f"{''.join(drawn)}</svg>"
    )


def _size(node: OutlineNode) -> tuple[float, float]:
    title = len(_title(node))
    match node.kind:
        case "gemm" | "attention":
            return max(7.4 * title + _TAG + 30, 6.4 * len(_second_line(node)) + 30, 128.0), 44.0
        case "cast":
            return 6.9 * title + 42, 24.0
        case _ if node.label == "add":
            return 26.0, 26.0
    return max(6.6 * title + 24, 48.0), 26.0


def _title(node: OutlineNode) -> str:
    text = "+" if node.kind == "glue" and node.label == "add" else node.label
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _second_line(node: OutlineNode) -> str:
    """Returns the second line of text in the box of a matmul: role or GEMM, sizes, number of layers."""
    if node.kind == "attention":
        return node.shape
    gemm = node.gemm if node.phase == "backward" else ""
    inside = len(node.names) // max(len(_block_paths(node)), 1)
    times = f"×{inside}" if inside > 1 else ""
    return " · ".join(part for part in (gemm or node.role, node.shape, times) if part)


def _block_paths(node: OutlineNode) -> tuple[str, ...]:
    return tuple(dict.fromkeys(inner_block(name) for name in node.names))


def _frame(outline: Outline, layout: Layout, members: list[int]) -> str:
    boxes = [layout.boxes[i] for i in members]
    left = min(box.x - box.width / 2 for box in boxes) - _PAD
    right = max(box.x + box.width / 2 for box in boxes) + _PAD
    top = min(box.y - box.height / 2 for box in boxes) - _PAD + 2
    bottom = max(box.y + box.height / 2 for box in boxes) + _PAD - 2
    paths = _block_paths(outline.nodes[members[0]])
    times = f" ×{len(paths)}" if len(paths) > 1 else ""
    label = spelled(paths)
    label = label if len(label) <= 40 else f"{label[:13]}…{label[-26:]}"
    inside = set(members)
    back = any(b <= a and a in inside and b in inside for a, b in outline.edges)
    loop = ""
    if times and back:
        x = left - 14
        loop = (
            f'<path class="loop" d="M{left:.1f} {bottom - 14:.1f}H{x + 8:.1f}q-8 0-8-8V{top + 22:.1f}'
            f'q0-8 8-8H{left - 2:.1f}"/><path class="tip" d="m{left - 8:.1f} {top + 10:.1f} 8 4-8 4z"/>'
        )
    return (
        f'<g class="block"><rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}"'
        f' height="{bottom - top:.1f}" rx="12"/>{loop}'
        f'<text x="{left + 10:.1f}" y="{top - 5:.1f}">{escape(label)}'
        f'<tspan class="times">{times}</tspan></text></g>'
    )


def _node(node: OutlineNode, index: int, box: Box) -> str:
    x, y = box.x - box.width / 2, box.y - box.height / 2
    title = escape(_title(node))
    corner = box.height / 2 if node.kind in ("cast", "glue", "input") else 7
    shown = _rect(x, y, box.width, box.height, f'rx="{corner}"')
    if node.kind in ("gemm", "attention"):
        tag = precisions.label(node.precision)
        shown += (
            _rect(x, y + 6, 5, box.height - 12, 'class="stripe" rx="2"')
            + f'<text x="{x + 14:.1f}" y="{y + 18:.1f}" class="title">{title}</text>'
            f'<text x="{x + 14:.1f}" y="{y + 34:.1f}" class="below">{escape(_second_line(node))}</text>'
            f'<text x="{x + box.width - 8:.1f}" y="{y + 17:.1f}" class="tag">{escape(tag)}</text>'
        )
    elif node.kind == "cast":
        shown += (
            f'<path class="icon" d="{_icon(node, x + 15, box.y)}"/>'
            f'<text x="{x + 26:.1f}" y="{box.y + 4:.1f}">{title}</text>'
        )
    else:
        shown += f'<text x="{box.x:.1f}" y="{box.y + 4:.1f}" text-anchor="middle">{title}</text>'
    word = precisions.label(node.precision)
    classes = " ".join(
        part for part in ("node", node.kind, tone(node.precision), f"role-{node.role}") if part
    )
    text = ", ".join(part for part in (node.kind, node.label, node.role, node.gemm, word) if part)
    return (
        f'<g class="{escape(classes)}" data-node="{index}" tabindex="0" role="button"'
        f' aria-label="{escape(text)}"><title>{escape(spelled(node.names) or node.label)}</title>{shown}</g>'
    )


def _rect(x: float, y: float, width: float, height: float, more: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" {more}/>'


def _icon(node: OutlineNode, x: float, y: float) -> str:
    """Returns an SVG path with the direction of a cast's blocks: a horizontal or vertical double arrow."""

    def at(along: float, across: float) -> str:
        right, down = (-across, along) if "columnwise" in node.detail else (along, across)
        return f"{x + right:.1f} {y + down:.1f}"

    return (
        f"M{at(-6, 0)}L{at(6, 0)}M{at(-6, 0)}L{at(-3, -3)}M{at(-6, 0)}L{at(-3, 3)}"
        f"M{at(6, 0)}L{at(3, -3)}M{at(6, 0)}L{at(3, 3)}"
    )
