"""The picture of a model: every matmul and cast is in it, and it says how they hang together."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from helpers.blocks import WIDTH, Experts, Explicit, Language, SwiGLU, block, features
from helpers.eager_backend import EagerBackend
from helpers.made import Made
from helpers.one_linear import policy
from helpers.reports import report_of
from torch import Tensor, fx, nn
from torch._inductor.runtime.cache_dir_utils import cache_dir

import mxcompile
from mxcompile.compiler.reporting import entry
from mxcompile.passes.outline import outline
from mxcompile.report import Outline, OutlineNode, Part, Report


def picture(model: nn.Module, *args: Tensor, training: bool = True, **options: Any) -> tuple[Outline, Report]:
    report = report_of(model, *args, training=training, **options)
    (graph,) = report.graph
    return graph, report


def of_kind(graph: Outline, kind: str, phase: str = "forward") -> list[OutlineNode]:
    return [node for node in graph.nodes if node.kind == kind and node.phase == phase]


def readers(graph: Outline, node: OutlineNode) -> Iterator[OutlineNode]:
    index = graph.nodes.index(node)
    return (graph.nodes[b] for a, b in graph.edges if a == index)


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (block, features(2, 9, WIDTH)),
        (Explicit, features(2, 9, WIDTH)),
        (Experts, features(16, WIDTH)),
        (lambda: Language(tied=False), torch.arange(18).reshape(2, 9)),
    ],
    ids=["block", "explicit", "experts", "language"],
)
def test_the_matmuls_are_those_of_the_report(make: Any, x: Tensor):
    graph, report = picture(make(), x)
    drawn = {
        (name, node.role, node.gemm, node.precision)
        for node in graph.nodes
        if node.kind == "gemm"
        for name in node.names
    }
    attended = {name for node in graph.nodes if node.kind == "attention" for name in node.names}
    recorded = {(g.name, g.role, g.gemm, g.precision) for g in report.gemms}
    assert drawn <= recorded
    assert {gemm[0] for gemm in recorded - drawn} <= attended
    assert all(role.startswith("attn_") for _, role, _, _ in recorded - drawn)


def test_q_k_and_v_read_one_cast_and_backward_another():
    graph, _ = picture(block(), features(2, 9, WIDTH))
    shared = [[r.names for r in readers(graph, cast)] for cast in of_kind(graph, "cast")]
    assert [("0.b.a",), ("0.b.b",), ("0.b.c",)] in shared
    first, second = of_kind(graph, "cast")[:2]
    assert (first.label, second.label) == ("e4m3 rowwise", "e4m3 columnwise")
    assert not graph.only_backward(graph.nodes.index(first))
    assert graph.only_backward(graph.nodes.index(second))
    assert (first.detail, first.shape) == ("e4m3 1x32 rceil, rowwise", "18×64")


@pytest.mark.parametrize(
    ("use", "labels"),
    [
        (
            {"precision": "mxfp8", "elem_dtype": "e5m2", "rounding": "floor"},
            ["e5m2 rowwise", "e5m2 columnwise"],
        ),
        ({"precision": "mxfp8", "weight_block": "32x32"}, ["e4m3 rowwise", "e4m3 columnwise"]),
        ({"precision": "mxfp8", "saved": "transcode"}, ["e4m3 rowwise", "decode", "e4m3 columnwise"]),
    ],
    ids=["e5m2", "square", "transcode"],
)
def test_labels_of_casts_name_elements_and_layout(use: dict[str, str], labels: list[str]):
    graph, _ = picture(nn.Sequential(nn.Linear(WIDTH, WIDTH)), features(40, WIDTH), policy=policy(use))
    assert [node.label for node in of_kind(graph, "cast")] == labels


def test_the_flow_of_a_block():
    graph, _ = picture(block(), features(2, 9, WIDTH))
    forward = [i for i, node in enumerate(graph.nodes) if node.phase == "forward"]
    flow = nx.DiGraph([(a, b) for a, b in graph.edges if a in forward and b in forward])
    assert nx.is_directed_acyclic_graph(flow)
    at = {node.names[0]: i for i, node in enumerate(graph.nodes) if node.kind == "gemm" and i in forward}
    assert nx.has_path(flow, at["0.b.a"], at["0.b.d"])
    assert nx.has_path(flow, at["0.b.d"], at["1.b.a"])
    assert nx.has_path(flow, at["1.b.b"], at["1.b.c"])
    assert not nx.has_path(flow, at["1.b.a"], at["1.b.b"])
    assert not nx.has_path(flow, at["1.b.c"], at["0.b.a"])
    labels = [node.label for node in of_kind(graph, "glue")]
    assert labels.count("add") == 2
    assert "LayerNorm" in labels


def test_equal_layers_are_drawn_once_and_one_that_differs_by_itself():
    model, x = nn.Sequential(*(block() for _ in range(5))), features(2, 9, WIDTH)
    graph, _ = picture(model, x)
    ups = [node.names for node in of_kind(graph, "gemm") if node.names[0].endswith("1.b.a")]
    assert ups == [tuple(f"{i}.1.b.a" for i in range(5))]
    assert any(b < a for a, b in graph.edges)

    kept = {"version": 1, "rules": [{"match": {"name": "2.1.b.a"}, "use": "bf16"}]}
    graph, _ = picture(model, x, policy=kept)
    ups = [(node.names, node.precision) for node in of_kind(graph, "gemm") if node.names[0].endswith("1.b.a")]
    assert ups == [(("0.1.b.a", "1.1.b.a", "3.1.b.a", "4.1.b.a"), "mxfp8"), (("2.1.b.a",), "bf16")]


def test_masks_and_positions_are_left_out():
    class Masked(Made, a=(WIDTH, WIDTH), b=(WIDTH, WIDTH), scale=lambda: nn.Buffer(torch.ones(WIDTH))):
        def forward(self, x: Tensor) -> Tensor:
            positions = torch.arange(x.shape[0], device=x.device).float().cos() + self.scale.sum()
            return self.b(self.a(x) * positions[:, None])

    graph, _ = picture(Masked(), features(9, WIDTH))
    assert [node.detail for node in of_kind(graph, "glue")] == ["mul"]


def test_inference_has_no_backward():
    graph, _ = picture(block(), features(2, 9, WIDTH), training=False)
    assert {node.phase for node in graph.nodes} == {"forward"}
    assert {node.label for node in of_kind(graph, "cast")} == {"e4m3 rowwise"}


def test_a_graph_break_makes_two_pictures():
    class Broken(Made, a=SwiGLU, b=SwiGLU):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            torch._dynamo.graph_break()
            return self.b(x)

    torch.compile(Broken(), backend=EagerBackend())(features(9, WIDTH)).mean().backward()
    drawn = [outline for report in mxcompile.reports() for outline in report.graph if outline.nodes]
    assert [{n.names[0].partition(".")[0] for n in o.nodes if n.kind == "gemm"} for o in drawn] == [
        {"a"},
        {"b"},
    ]


def test_the_picture_is_kept_with_the_cache():
    graph, report = picture(block(), features(2, 9, WIDTH))
    part = Part(gemms=report.gemms, outline=graph)
    entry.save("picture", part)
    assert entry.load("picture") == part
    assert Report.from_json(report.to_json()).graph == (graph,)


def test_failed_save_leaves_no_file_in_the_cache(monkeypatch):
    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    entry.save("never_kept", Part())
    monkeypatch.undo()
    assert not [file for file in (Path(cache_dir()) / "mxcompile").iterdir() if "never_kept" in file.name]


def work(graph: fx.Graph) -> int:
    """How many calls drawing `graph` takes."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        outline(graph)
    finally:
        sys.setprofile(None)
    return calls


def test_work_is_linear_in_the_graph():
    calls = []
    for depth in (4, 24):
        backend = EagerBackend(policy="bf16")
        model = nn.Sequential(*(SwiGLU() for _ in range(depth)))
        torch.compile(model, backend=backend)(features(9, WIDTH)).mean().backward()
        calls.append(work(backend.graphs[0].graph))
        torch._dynamo.reset()
    assert calls[1] < 6.5 * calls[0]
