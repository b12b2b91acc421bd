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
    files = {}
    for root, folder in TREES.items():
        for path in folder.rglob("*.py"):
            if path.is_relative_to(ROOT / "mxcompile" / root.rpartition(".")[2]) and root != "mxcompile":
                continue
            steps = path.relative_to(folder).with_suffix("").parts
            if root == "mxcompile" and steps[0] in ("passes", "lowering"):
                continue
            files[".".join((root, *steps)).removesuffix(".__init__")] = path
    return files


def imported(tree: ast.Module) -> Iterator[str]:
    """What the module imports, also late, in functions, and for type checkers alone."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.Import(names=names):
                yield from (alias.name for alias in names)


def test_no_module_is_in_a_circle():
    files = modules()
    assert len(files) > 150
    graph: nx.DiGraph[str] = nx.DiGraph()
    for name, path in files.items():
        for target in imported(ast.parse(path.read_text(encoding="utf-8"))):
            needed = target if target in files else target.rpartition(".")[0]
            if needed in files and needed != name:
                graph.add_edge(name, needed)
    assert graph.number_of_edges() > 300
    assert [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1] == []


def circles() -> list[list[str]]:
    """The folders that import each other, directly or through others; all import those beside `errors`."""
    files = modules()
    rooms: nx.DiGraph[str] = nx.DiGraph()
    for path in files.values():
        room = str(path.parent.relative_to(ROOT))
        for target in imported(ast.parse(path.read_text(encoding="utf-8"))):
            needed = files.get(target) or files.get(target.rpartition(".")[0])
            if needed is not None and needed.parent not in (path.parent, ROOT / "mxcompile"):
                rooms.add_edge(room, str(needed.parent.relative_to(ROOT)))
    return [sorted(circle) for circle in nx.strongly_connected_components(rooms) if len(circle) > 1]


def test_no_folder_is_in_a_circle():
    assert circles() == []


LEVELS = (
    "errors publish private_names versions", "formats", "policy", "ops", "report", "storage", "graph",
    "models", "passes lowering", "rules", "plan watch", "compiler", "serving distributed", "checkpoint ranks",
    "offline", "mesh", "analysis.explain analysis.study", "analysis.audit",
    "analysis.tune analysis.blame analysis.compare", "cli",
)  # fmt: skip
"""The rooms, from the lowest level. A room uses rooms of lower levels, and none of its own level."""


def test_rooms_use_rooms_of_lower_levels():
    rank = {room: rank for rank, rooms in enumerate(LEVELS) for room in rooms.split()}
    above = {"mxcompile", "mxcompile.__main__", "mxcompile.analysis"}
    files = modules()

    def room(name: str) -> str:
        first, second = [*name.split("."), ""][1:3]
        return f"{first}.{second}" if first == "analysis" else first

    assert {room(name) for name in files.keys() - above} == rank.keys()
    wrong = set()
    for name in files.keys() - above:
        for target in imported(ast.parse(files[name].read_text(encoding="utf-8"))):
            needed = target if target in files else target.rpartition(".")[0]
            if needed not in files.keys() - above:
                continue
            user_room, other = room(name), room(needed)
            if user_room != other and rank[user_room] <= rank[other]:
                wrong.add((name, needed))
    assert not wrong


FLOORS = ["session", "capture", "hooks", "reporting", "calls"]
"""The folders of the room `compiler`, from the lowest. What lies beside them is used by all, or uses all."""


def test_folders_of_the_compiler_use_lower_ones():
    files = modules()
    folder = {name: name.split(".")[2] for name in files if name.startswith("mxcompile.compiler.")}
    assert set(FLOORS) <= set(folder.values())
    wrong = set()
    for name, user_folder in folder.items():
        for target in imported(ast.parse(files[name].read_text(encoding="utf-8"))):
            other = folder.get(target) or folder.get(target.rpartition(".")[0])
            if user_folder in FLOORS and other in FLOORS and FLOORS.index(user_folder) < FLOORS.index(other):
                wrong.add((name, target))
    assert not wrong


def test_the_walk_sees_late_imports_too():
    source = "if TYPE_CHECKING:\n    import a\nimport b\ntry:\n    from c import d\nfinally:\n    pass\n"
    assert sorted(imported(ast.parse(source + "def f():\n    import e\n"))) == ["a", "b", "c.d", "e"]
