"""Importing mxcompile costs next to nothing, and nobody has to."""

from __future__ import annotations

import subprocess
import sys

HEAVY = (
    "networkx", "triton", "torchao", "yaml", "tabulate", "tqdm", "transformers", "matplotlib", "sympy",
)  # fmt: skip


def python(*lines: str) -> list[str]:
    """The lines that a fresh interpreter prints for `lines`."""
    code = "\n".join(lines)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_import_loads_nothing_else():
    """Not even torch, which a user of the command line's help does not wait for."""
    found = python(
        "import sys", "before = set(sys.modules)", "import mxcompile", "print(*set(sys.modules) - before)"
    )
    loaded = found[0].split()
    assert "mxcompile" in loaded
    assert [name for name in loaded if name.startswith("mxcompile.")] == []
    assert [name for name in loaded if name.startswith(("torch", *HEAVY))] == []


def test_every_public_name_is_found_when_it_is_used():
    lines = ("import mxcompile", "print(*(n for n in mxcompile.__all__ if getattr(mxcompile, n) is None))")
    assert python(*lines) == [""]


def test_an_unknown_name_is_an_attribute_error():
    lines = ("import mxcompile", "print(hasattr(mxcompile, 'quantise'), 'quantize' in dir(mxcompile))")
    assert python(*lines) == ["False True"]


def test_the_backend_is_found_without_an_import():
    """Dynamo knows the name from the entry point, and loads the module when it is asked for."""
    lines = (
        "import sys, torch._dynamo",
        "print('mxfp8' in torch._dynamo.list_backends(), 'mxcompile' in sys.modules)",
        "backend = torch._dynamo.lookup_backend('mxfp8')",
        "print(backend.__module__, backend.__name__)",
    )
    assert python(*lines) == ["True False", "mxcompile.compiler.backend mxfp8"]


def test_operators_are_registered_in_either_order():
    """A graph saved with mx operators loads once both are imported; torch is as without us."""
    ask = "print(hasattr(torch.ops.mx, 'quantize'), type(torch.__loader__).__name__, torch.__spec__.name)"
    expected = ["True SourceFileLoader torch"]
    assert python("import mxcompile", "import torch", ask) == expected
    assert python("import torch", "import mxcompile", ask) == expected
    assert python("import mxcompile", "import torch.nn", "import torch", ask) == expected
    assert python("from mxcompile import Policy", "import torch", ask) == expected


def test_without_torch_the_package_still_imports():
    lines = ("import sys", "sys.modules['torch'] = None", "import mxcompile", "print(mxcompile.__version__)")
    assert python(*lines)
