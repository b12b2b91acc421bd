"""Whether the wheels of torch or Triton given as arguments define the private names that mxcompile uses.

    python tests/packaging/names_in_wheel.py torch-2.14.1-*.whl

Read from the source in the wheel, nothing is installed. Names that C++ defines are not seen and left out.
"""

from __future__ import annotations

import ast
import sys
import zipfile

from mxcompile.private_names import used


def absent(wheel: str) -> list[str]:
    """Names of `used` that `wheel` has the package for and does not define."""
    with zipfile.ZipFile(wheel) as archive:
        files = {*archive.namelist()}
        missing = []
        for module, names in used().items():
            path = module.replace(".", "/")
            if f"{module.split('.')[0]}/__init__.py" not in files or module in ("torch", "torch._C"):
                continue
            source = next((file for file in (f"{path}.py", f"{path}/__init__.py") if file in files), None)
            defined = _defined(archive.read(source).decode()) if source else set()
            for name in names:
                first = name.split(".")[0]
                inner = {f"{path}/{first}.py", f"{path}/{first}/__init__.py"}
                if first not in defined and not inner & files:
                    missing.append(f"{module}.{name}")
        return missing


def _defined(source: str) -> set[str]:
    """Names that the module binds, in branches too, not in functions and classes."""
    names: set[str] = set()
    queue: list[ast.AST] = [ast.parse(source)]
    while queue:
        for node in ast.iter_child_nodes(queue.pop()):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
                continue
            if isinstance(node, ast.Import | ast.ImportFrom):
                names |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            queue.append(node)
    return names


if __name__ == "__main__":
    lacking = {wheel: absent(wheel) for wheel in sys.argv[1:]}
    for wheel, names in lacking.items():
        sys.stdout.write(f"{wheel}: {', '.join(names) or 'all there'}\n")
    sys.exit(any(lacking.values()))
