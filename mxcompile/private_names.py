"""The names of PyTorch and Triton that are not public and that mxcompile uses, read from its own source.

A compiler for Inductor cannot do without them, and any release may rename them. Code that needs a missing
name falls back with a reason (`lowering.optional`) or fails where it is imported. `missing`, which
``mxcompile env`` prints, says which those are before anything is compiled. A script looks for them in a wheel
that is not installed (`tests/packaging/names_in_wheel.py`).
"""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parent
_FOLDERS = (_PACKAGE, _PACKAGE / "lowering", _PACKAGE / "passes")  # the latter are links in a checkout
_LIBRARIES = ("torch", "triton")


@functools.cache
def used() -> dict[str, tuple[str, ...]]:
    """Names by module, in order; of an attribute of a name, both with a dot between them."""
    names: dict[str, set[str]] = {}
    for folder in _FOLDERS:
        for file in folder.rglob("*.py"):
            for module, name in uses_of(ast.parse(file.read_text(encoding="utf-8"))):
                names.setdefault(module, set()).add(name)
    return {module: tuple(sorted(names[module])) for module in sorted(names)}


def uses_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Module and name of each private name that `tree` imports, reads of an import, or overrides.

    A method that calls its base's by ``super()`` overrides it. An import under a ``try`` is not needed.
    """
    bound: dict[str, tuple[str, str]] = {library: (library, "") for library in _LIBRARIES}
    tried = {id(each) for node in ast.walk(tree) if isinstance(node, ast.Try) for each in node.body}
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
    """The names of ``a.b.c``, the first "" if it is not a name."""
    path: list[str] = []
    while isinstance(node, ast.Attribute):
        path.insert(0, node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "", *path]


def _extended(kind: ast.ClassDef) -> Iterator[str]:
    """The methods of a class that call those of the same name of its base."""
    for method in kind.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("__"):
            calls = {ast.unparse(node.func) for node in ast.walk(method) if isinstance(node, ast.Call)}
            if f"super().{method.name}" in calls:
                yield method.name


def _is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in path.split("."))


def missing() -> list[str]:
    """Returns the names of `used` that the installed versions lack, with their modules."""
    import torch._inductor.compile_fx  # noqa: F401 — parts of Inductor import each other, in its order

    return [
        f"{module}.{name}" for module, names in used().items() for name in names if not _exists(module, name)
    ]


def _exists(module: str, name: str) -> bool:
    try:
        owner: Any = importlib.import_module(module)
        for part in name.split("."):
            if not hasattr(owner, part):
                owner = importlib.import_module(f"{owner.__name__}.{part}")
            else:
                owner = getattr(owner, part)
    except (ImportError, AttributeError):
        return False
    return True
