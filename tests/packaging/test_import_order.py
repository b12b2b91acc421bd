"""Imports point one way: no module uses one that uses it, neither at import nor later."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parents[2]
TREES = {
    "mxcompile": ROOT / "mxcompile",
    "mxcompile.passes": ROOT / "passes",
    "mxcompile.lowering": ROOT / "lowering",
}


def modules() -> dict[str, Path]:
    found = {}
    for root, folder in TREES.items():
        for path in folder.rglob("*.py"):
            if path.is_relative_to(ROOT / "mxcompile" / root.rpartition(".")[2]) and root != "mxcompile":
                continue
            steps = path.relative_to(folder).with_suffix("").parts
            if root == "mxcompile" and steps[0] in ("passes", "lowering"):
                continue
            found[".".join((root, *steps)).removesuffix(".__init__")] = path
    return found


def imported(tree: ast.Module) -> Iterator[str]:
    """What the module imports, also late, in functions, and for type checkers alone."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.Import(names=names):
                yield from (alias.name for alias in names)


def test_no_module_is_in_a_circle():
    known = modules()
    assert len(known) > 150
    graph: nx.DiGraph[str] = nx.DiGraph()
    for name, path in known.items():
        for target in imported(ast.parse(path.read_text(encoding="utf-8"))):
            needed = target if target in known else target.rpartition(".")[0]
            if needed in known and needed != name:
                graph.add_edge(name, needed)
    assert graph.number_of_edges() > 300
    circles = [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1]
    assert circles == []


ROOMS = (
    "errors publish", "formats", "policy", "ops", "report", "storage", "graph", "models", "passes lowering",
    "rules", "plan", "watch", "compiler", "analysis offline serving distributed checkpoint mesh", "cli",
)  # fmt: skip
"""As docs/architecture.md has them, from the lowest. On one level they may use each other, but for passes."""


def test_rooms_use_lower_rooms():
    rank = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms.split()}
    wrong = []
    for name, path in modules().items():
        for target in imported(ast.parse(path.read_text(encoding="utf-8"))):
            own, other = (f"{each}.".split(".")[1] for each in (name, target))
            if not target.startswith("mxcompile.") or own not in rank or other not in rank:
                continue
            apart = {own, other} == {"passes", "lowering"}
            if rank[own] < rank[other] or apart:
                wrong.append((name, target))
    assert wrong == []


def test_the_walk_sees_late_imports_too():
    source = "if TYPE_CHECKING:\n    import a\nimport b\ntry:\n    from c import d\nfinally:\n    pass\n"
    assert sorted(imported(ast.parse(source + "def f():\n    import e\n"))) == ["a", "b", "c.d", "e"]
