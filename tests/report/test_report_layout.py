"""The drawing: rows along the flow, nothing on top of anything else."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_reports import node

from mxcompile.report import Outline
from mxcompile.report.forms.layout import GAP, Layout, lay_out

SIZE = (100.0, 30.0)


def placed(outline: Outline) -> Layout:
    chosen = range(len(outline.nodes))
    return lay_out(outline, chosen, {i: (60.0 + 40 * (i % 3), 20.0 + 8 * (i % 2)) for i in chosen})


def outline_of(*names: str, edges: tuple[tuple[int, int], ...]) -> Outline:
    return Outline(nodes=tuple(node("glue", name) for name in names), edges=edges)


def check(outline: Outline) -> None:
    layout = placed(outline)
    boxes = layout.boxes
    for a, b in itertools.combinations(boxes, 2):
        apart_x = abs(boxes[a].x - boxes[b].x) >= (boxes[a].width + boxes[b].width) / 2 + GAP - 0.01
        apart_y = abs(boxes[a].y - boxes[b].y) >= (boxes[a].height + boxes[b].height) / 2
        assert apart_x or apart_y
    for (a, b), points in layout.lines.items():
        assert boxes[a].y < boxes[b].y
        heights = [y for _, y in points]
        assert heights == sorted(heights)
    for box in boxes.values():
        assert box.x - box.width / 2 >= -0.01
        assert box.x + box.width / 2 <= layout.width + 0.01
        assert box.y - box.height / 2 >= 0
        assert box.y + box.height / 2 <= layout.height + 0.01


NAMES = st.sampled_from(["", "a", "b.0.x", "b.1.x", "b.1.y", "c.2"])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_nodes_do_not_overlap_and_edges_lead_down(data: st.DataObject):
    names = data.draw(st.lists(NAMES, min_size=1, max_size=14))
    places = st.integers(0, len(names) - 1)
    edges = data.draw(st.sets(st.tuples(places, places), max_size=25))
    check(outline_of(*names, edges=tuple(sorted(edges))))


def test_an_edge_past_a_row_goes_round_its_node():
    layout = placed(outline_of("a", "b", "c", edges=((0, 1), (1, 2), (0, 2))))
    middle = layout.boxes[1]
    (x, _), (x2, _) = layout.lines[0, 2][1:3]
    assert x == x2
    assert abs(x - middle.x) > middle.width / 2


def test_block_is_placed_below_earlier_blocks():
    names = ("in", "layers.0.a", "layers.0.b", "layers.1.a", "out")
    layout = placed(outline_of(*names, edges=((0, 1), (1, 2), (0, 3), (3, 4))))
    assert all(layout.boxes[i].y < layout.boxes[i + 1].y for i in range(4))


def test_edges_that_lead_back_are_left_out():
    assert set(placed(outline_of("a", "b", edges=((0, 1), (1, 0), (1, 1)))).lines) == {(0, 1)}


@pytest.mark.parametrize("count", [1, 300])
def test_a_long_chain_stays_narrow(count: int):
    assert placed(outline_of(*["x"] * count, edges=tuple((i, i + 1) for i in range(count - 1)))).width <= 200


def test_the_same_outline_is_drawn_the_same():
    outline = outline_of("a", "b", "c", "d", edges=((0, 2), (1, 2), (0, 3), (1, 3)))
    assert placed(outline) == placed(outline)
