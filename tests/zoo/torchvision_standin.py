"""What timm and vit-pytorch import of torchvision, where torchvision is not installed or does not load.

PyPI's torchvision brings operators for one build of torch and cannot be imported beside another (a CPU-only
one), and then `transformers` cannot either: so `make test-slow` installs these two without it. They use it
for data sets and image transforms, of which the zoo needs none: any name is an empty class here.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import nn


class _Empty(type):
    """Of classes every attribute of which is one more (`InterpolationMode.BILINEAR`)."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Empty(name, (), {})

    def __call__(cls, *_: Any, **__: Any) -> Any:
        # models of timm are built beside it; what would need torchvision's operators must fail, not pass
        raise NotImplementedError(f"torchvision's {cls.__name__} is a stand-in here")


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "FrozenBatchNorm2d":
            return type(name, (nn.Module,), {})
        return _Empty(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


@contextmanager
def torchvision():
    """Within, `import torchvision` works: the real one if it loads, else the stand-in, gone afterwards."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        pass
    else:
        yield
        return
    finder = _Finder()
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
