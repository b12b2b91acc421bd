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
    """Module and name of each private name that `tree` imports, or reads as an attribute of an import."""
    bound: dict[str, tuple[str, str]] = {library: (library, "") for library in _LIBRARIES}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in _LIBRARIES:
            for alias in node.names:
                bound[alias.asname or alias.name] = node.module, alias.name
                if _is_private(f"{node.module}.{alias.name}"):
                    yield node.module, alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            path: list[str] = []
            base: ast.expr = node
            while isinstance(base, ast.Attribute):
                path.insert(0, base.attr)
                base = base.value
            if isinstance(base, ast.Name) and base.id in bound and _is_private(".".join(path)):
                module, name = bound[base.id]
                first = next(index for index, part in enumerate(path) if _is_private(part))
                yield module, ".".join(filter(None, (name, *path[: first + 1])))


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
