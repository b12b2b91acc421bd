"""Importing mxcompile costs next to nothing, and nobody has to."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import mxcompile

HEAVY = (
    "jinja2", "networkx", "triton", "torchao", "yaml", "tabulate", "tqdm", "transformers", "matplotlib",
    "sympy",
)  # fmt: skip


def python(*lines: str) -> list[str]:
    """The lines that a fresh interpreter prints for `lines`."""
    code = "\n".join(lines)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def _is_installed() -> bool:
    try:
        metadata.distribution("mxcompile")
    except metadata.PackageNotFoundError:
        return False
    return True


installed = pytest.mark.skipif(not _is_installed(), reason="mxcompile is not installed, only on the path")

UNINSTALL = (
    "from importlib.metadata import Distribution",
    "every = Distribution.discover.__func__",
    "others = lambda *a, **k: (d for d in every(*a, **k) if d.name != 'mxcompile')",
    "Distribution.discover = classmethod(others)",
)
"""Lines after which a fresh interpreter finds the package on its path, and no metadata of it."""


@installed
def test_import_loads_nothing_else():
    """Not even torch, which a user of the command line's help does not wait for."""
    printed = "print(*set(sys.modules) - before)"
    loaded = python("import sys", "before = set(sys.modules)", "import mxcompile", printed)[0].split()
    assert "mxcompile" in loaded
    assert [name for name in loaded if name.startswith("mxcompile.")] == []
    assert [name for name in loaded if name.startswith(("torch", *HEAVY))] == []


def test_every_public_name_is_found_when_it_is_used():
    lines = ("import mxcompile", "print(*(n for n in mxcompile.__all__ if getattr(mxcompile, n) is None))")
    assert python(*lines) == [""]


def test_an_unknown_name_is_an_attribute_error():
    lines = ("import mxcompile", "print(hasattr(mxcompile, 'quantise'), 'quantize' in dir(mxcompile))")
    assert python(*lines) == ["False True"]


@installed
def test_the_backend_is_found_without_an_import():
    """Dynamo knows the name from the entry point, and loads the module when it is asked for."""
    lines = (
        "import sys, torch._dynamo",
        "print('mxfp8' in torch._dynamo.list_backends(), 'mxcompile' in sys.modules)",
        "backend = torch._dynamo.lookup_backend('mxfp8')",
        "print(backend.__module__, backend.__name__)",
    )
    assert python(*lines) == ["True False", "mxcompile.compiler.backend mxfp8"]


@pytest.mark.parametrize("before", ["", "torch._dynamo.list_backends()"], ids=["new", "listed"])
def test_a_checkout_that_is_not_installed_has_the_backend_once_it_is_imported(before: str):
    """Also where Dynamo has already looked for entry points."""
    ask = "print('mxfp8' in torch._dynamo.list_backends())"
    lookup = "print(torch._dynamo.lookup_backend('mxfp8').__module__)"
    output = python(*UNINSTALL, "import torch._dynamo", before, "import mxcompile", ask, lookup)
    assert output == ["True", "mxcompile.compiler.backend"]


@installed
def test_import_leaves_python_and_torch_unchanged():
    """Neither how Python imports nor what the package is; torch is as without it, whichever comes first."""
    lines = ("import sys", "before = [*sys.meta_path]", "import mxcompile", "print(before == sys.meta_path)")
    assert python(*lines, "print(type(mxcompile).__name__)") == ["True", "module"]
    ask = "print(hasattr(torch.ops.mx, 'cast'), type(torch.__loader__).__name__)"
    assert python("import mxcompile, torch", ask) == ["False SourceFileLoader"]
    assert python("import torch, mxcompile", ask) == ["False SourceFileLoader"]


def test_the_first_use_registers_operators():
    ask = "print(hasattr(torch.ops.mx, 'cast'))"
    assert python("import mxcompile", "import torch", "mxcompile.Policy", ask) == ["True"]
    assert python("from mxcompile import Policy", "import torch", ask) == ["True"]


def test_no_public_name_is_the_name_of_a_module():
    """Python would put the module in the place of the name when the module is imported."""
    modules = {path.stem for path in Path(mxcompile.__file__).parent.iterdir()}
    assert len(modules) > 15
    assert set(mxcompile.__all__) & modules == set()


@pytest.mark.parametrize("before", [(), UNINSTALL], ids=["installed", "checkout"])
def test_without_torch_the_package_still_imports(before: tuple[str, ...]):
    lines = ("import sys", "sys.modules['torch'] = None", "import mxcompile", "print(mxcompile.__version__)")
    assert python(*before, *lines)
