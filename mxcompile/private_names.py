"""Lists the private names of PyTorch and Triton that mxcompile uses, by parsing mxcompile's own source.

An Inductor backend cannot work without private names, and any release may rename them. Code that needs a
missing name falls back with a reason (`lowering.optional`) or fails at import. ``mxcompile env`` prints the
result of `missing`, so a user sees the missing names before compiling anything. The script
`tests/packaging/names_in_wheel.py` looks for the names in a wheel without installing it.
"""

from __future__ import annotations

import ast
import functools
import pkgutil
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = Path(__file__).parent
_FOLDERS = (_PACKAGE, _PACKAGE / "lowering", _PACKAGE / "passes")  # a checkout has links to the last two
_LIBRARIES = ("torch", "triton")


@functools.cache
def used() -> dict[str, tuple[str, ...]]:
    """Returns the sorted private names by module. ``name.attribute`` is an attribute of an imported name."""
    names: dict[str, set[str]] = {}
    for folder in _FOLDERS:
        for file in folder.rglob("*.py"):
            for module, name in uses_of(ast.parse(file.read_text(encoding="utf-8"))):
                names.setdefault(module, set()).add(name)
    return {module: tuple(sorted(names[module])) for module in sorted(names)}


def uses_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields (module, name) for each private name that `tree` imports, reads as an attribute, or overrides.

    A method that calls ``super().method`` overrides that method. Imports in a ``try`` block are optional and
    left out.
    """
    bound: dict[str, tuple[str, str]] = {library: (library, "") for library in _LIBRARIES}
    tried = {id(statement) for node in ast.walk(tree) if isinstance(node, ast.Try) for statement in node.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in _LIBRARIES:
            for alias in node.names:
                bound[alias.asname or alias.name] = node.module, alias.name
                if _is_private(f"{node.module}.{alias.name}") and id(node) not in tried:
                    yield node.module, alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, *path = _path(node)
            if root in bound and _is_private(".".join(path)):
                module, name = bound[root]
                first = next(index for index, part in enumerate(path) if _is_private(part))
                yield module, ".".join(filter(None, (name, *path[: first + 1])))
        if isinstance(node, ast.ClassDef):
            for root, *path in map(_path, node.bases):
                module, name = bound.get(root, ("", ""))
                if module and _is_private(f"{module}.{name}"):
                    for method in _extended(node):
                        yield module, ".".join(filter(None, (name, *path, method)))


def _path(node: ast.expr) -> list[str]:
    """Returns the names of ``a.b.c``. The first is "" if the expression does not start with a name."""
    path: list[str] = []
    while isinstance(node, ast.Attribute):
        path.insert(0, node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "", *path]


def _extended(kind: ast.ClassDef) -> Iterator[str]:
    """Yields the methods of a class that call the base class's method of the same name."""
    for method in kind.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("__"):
            calls = {ast.unparse(node.func) for node in ast.walk(method) if isinstance(node, ast.Call)}
            if f"super().{method.name}" in calls:
                yield method.name


def _is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in path.split("."))


def missing() -> list[str]:
    """Returns ``module.name`` for the names of `used` that the installed versions lack."""
    import torch._inductor.compile_fx  # noqa: F401 — first, because Inductor's modules import each other

    return [
        f"{module}.{name}" for module, names in used().items() for name in names if not _exists(module, name)
    ]


def _exists(module: str, name: str) -> bool:
    try:
        pkgutil.resolve_name(f"{module}.{name}")
    except (ImportError, AttributeError):
        return False
    return True
