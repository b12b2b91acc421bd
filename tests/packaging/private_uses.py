"""Which names of torch and Triton that are not public a source tree uses, read from its syntax."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("mxcompile", "lowering", "passes")
LIBRARIES = ("torch", "triton")


def uses() -> dict[str, set[str]]:
    """Names by module; of an attribute of a name, both with a dot between them."""
    found: dict[str, set[str]] = {}
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            for module, name in _of(ast.parse(file.read_text(encoding="utf-8"))):
                found.setdefault(module, set()).add(name)
    return found


def _of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    bound: dict[str, tuple[str, str]] = {library: (library, "") for library in LIBRARIES}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in LIBRARIES:
            for alias in node.names:
                bound[alias.asname or alias.name] = node.module, alias.name
                if _private(f"{node.module}.{alias.name}"):
                    yield node.module, alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            path: list[str] = []
            base: ast.expr = node
            while isinstance(base, ast.Attribute):
                path.insert(0, base.attr)
                base = base.value
            if isinstance(base, ast.Name) and base.id in bound and _private(".".join(path)):
                module, name = bound[base.id]
                first = next(at for at, part in enumerate(path) if _private(part))
                yield module, ".".join(filter(None, (name, *path[: first + 1])))


def _private(path: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in path.split("."))
