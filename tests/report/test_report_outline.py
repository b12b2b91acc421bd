"""Folding the picture: equal blocks become one, everything else stays."""

from __future__ import annotations

from made_reports import node

from mxcompile.report import Outline, OutlineNode, folded
from mxcompile.report.data.outline import MAX_NODES


def chain(*nodes: OutlineNode) -> Outline:
    return Outline(nodes=nodes, edges=tuple((i, i + 1) for i in range(len(nodes) - 1)))


def block(number: int, **changes: str) -> list[OutlineNode]:
    return [
        node("glue", f"layers.{number}.norm", label="norm"),
        node("gemm", f"layers.{number}.up", **{"precision": "mxfp8", **changes}),
    ]


def names(outline: Outline) -> list[tuple[str, ...]]:
    return [outline_node.names for outline_node in outline.nodes]


def test_equal_blocks_become_one_and_an_edge_leads_back():
    outline = folded(chain(node("glue", "embed"), *block(0), *block(1), *block(2), node("gemm", "head")))
    assert names(outline) == [
        ("embed",),
        ("layers.0.norm", "layers.1.norm", "layers.2.norm"),
        ("layers.0.up", "layers.1.up", "layers.2.up"),
        ("head",),
    ]
    assert outline.edges == ((0, 1), (1, 2), (2, 1), (2, 3))


def test_a_block_that_differs_anywhere_stays_whole():
    assert names(folded(chain(*block(0), *block(1, precision="bf16"), *block(2)))) == [
        ("layers.0.norm", "layers.2.norm"),
        ("layers.0.up", "layers.2.up"),
        ("layers.1.norm",),
        ("layers.1.up",),
    ]


def test_blocks_of_another_container_stay_apart():
    outline = folded(chain(node("gemm", "encoder.0.up"), node("gemm", "decoder.0.up")))
    assert names(outline) == [("encoder.0.up",), ("decoder.0.up",)]


def test_equal_blocks_inside_blocks_become_one():
    experts = [node("gemm", f"layers.{i}.experts.{j}.up") for i in range(2) for j in range(3)]
    outline = folded(Outline(nodes=tuple(experts), edges=()))
    assert [len(outline_node.names) for outline_node in outline.nodes] == [6]


def test_different_blocks_inside_a_block_stay_apart():
    """Or their norms would be one, and the flow through the block a loop."""
    layer = ["block.0.layer.0.norm", "block.0.layer.0.q", "block.0.layer.1.norm", "block.0.layer.1.wi"]
    outline = chain(*(node("glue", name) for name in layer))
    assert folded(outline) == outline


def test_nodes_of_one_module_in_one_block_stay_apart():
    outline = folded(chain(*[node("glue", f"layers.{i}", label="add") for i in (0, 0, 1, 1)]))
    assert names(outline) == [("layers.0", "layers.1")] * 2
    assert outline.edges == ((0, 1), (1, 0))


def test_forward_and_backward_fold_by_themselves():
    backward = [node("gemm", f"layers.{i}.up", phase="backward", gemm="dgrad") for i in (1, 0)]
    different = node("cast", "layers.1.up", phase="backward")
    outline = folded(chain(*block(0), *block(1), *backward, different))
    assert names(outline)[:2] == [("layers.0.norm", "layers.1.norm"), ("layers.0.up", "layers.1.up")]
    assert len(outline.nodes) == 5


def test_a_picture_has_a_limit_in_each_phase():
    forward = [node("gemm", f"up_{i}") for i in range(MAX_NODES + 5)]
    outline = folded(chain(*forward, *[node("gemm", f"up_{i}", phase="backward") for i in range(3)]))
    assert (len(outline.nodes), outline.omitted) == (MAX_NODES + 3, 5)
    assert all(0 <= end < len(outline.nodes) for edge in outline.edges for end in edge)


def test_sum_of_outlines_shifts_the_edges():
    outline = chain(node("gemm", "a"), node("gemm", "b"))
    assert (outline + outline).edges == ((0, 1), (2, 3))
    assert Outline() + outline == outline


def test_widened_outline_has_names_of_copies():
    outline = chain(node("gemm", "layers.1.up"), node("gemm", "head"))
    wide = outline.widened(lambda name: ["layers.2.up"] if name.startswith("layers") else [])
    assert names(wide) == [("layers.1.up", "layers.2.up"), ("head",)]
