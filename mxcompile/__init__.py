"""torch.compile(model, backend="mxfp8"): train and serve PyTorch models in OCP MXFP8.

Importing this package imports nothing else: every public name is loaded when it is first used. The operators
in ``torch.ops.mx`` are there as soon as both this package and torch are imported, in whichever order, so that
graphs saved with them load, and so do files with an `MXTensor` under ``weights_only=True``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mxcompile.audit import Audit as Audit
    from mxcompile.audit import audit as audit
    from mxcompile.checkpoint import load_quantized as load_quantized
    from mxcompile.checkpoint import save_quantized as save_quantized
    from mxcompile.compiler.backend import Backend as Backend
    from mxcompile.compiler.front import compile as compile  # noqa: A004
    from mxcompile.compiler.histories import reduce_histories as reduce_histories
    from mxcompile.distributed import QuantizedGathers as QuantizedGathers
    from mxcompile.distributed import quantize_gathers_ as quantize_gathers_
    from mxcompile.explain import explain as explain
    from mxcompile.offline import CodegenResult as CodegenResult
    from mxcompile.offline import codegen as codegen
    from mxcompile.policy import Policy as Policy
    from mxcompile.report import GemmRecord as GemmRecord
    from mxcompile.report import Report as Report
    from mxcompile.report import clear_reports as clear_reports
    from mxcompile.report import gather_reports as gather_reports
    from mxcompile.report import reports as reports
    from mxcompile.serving import StoredWeights as StoredWeights
    from mxcompile.serving import aoti_configs as aoti_configs
    from mxcompile.serving import quantize_weights_ as quantize_weights_
    from mxcompile.serving import static_cache as static_cache
    from mxcompile.storage import MXTensor as MXTensor
    from mxcompile.storage import quantize as quantize
    from mxcompile.tune import tune as tune

__version__ = "0.1.0"

_HOME = {
    "Audit": "mxcompile.audit",
    "Backend": "mxcompile.compiler.backend",
    "CodegenResult": "mxcompile.offline",
    "GemmRecord": "mxcompile.report",
    "MXTensor": "mxcompile.storage",
    "Policy": "mxcompile.policy",
    "Report": "mxcompile.report",
    "aoti_configs": "mxcompile.serving",
    "audit": "mxcompile.audit",
    "clear_reports": "mxcompile.report",
    "codegen": "mxcompile.offline",
    "compile": "mxcompile.compiler.front",
    "explain": "mxcompile.explain",
    "StoredWeights": "mxcompile.serving",
    "gather_reports": "mxcompile.report",
    "load_quantized": "mxcompile.checkpoint",
    "QuantizedGathers": "mxcompile.distributed",
    "quantize": "mxcompile.storage",
    "quantize_gathers_": "mxcompile.distributed",
    "quantize_weights_": "mxcompile.serving",
    "reduce_histories": "mxcompile.compiler.histories",
    "reports": "mxcompile.report",
    "save_quantized": "mxcompile.checkpoint",
    "static_cache": "mxcompile.serving",
    "tune": "mxcompile.tune",
}

__all__ = ["__version__", *_HOME]


class _Package(ModuleType):
    """The package: a public function keeps its name when the submodule called like it is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in _HOME):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def _register() -> None:
    """Tell torch of what is ours: operators, and the tensors it may load."""
    importlib.import_module("mxcompile.ops")
    importlib.import_module("mxcompile.storage")


class _AfterTorch(MetaPathFinder, Loader):
    """Loads torch as it would have been, then tells it of what is ours."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The spec of torch, with this in the place of its loader."""
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """What torch's own loader makes."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run torch, then `_register`."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        if not any(
            name.startswith("mxcompile.") for name in sys.modules
        ):  # else one of ours is half imported
            _register()


if sys.modules.get("torch") is not None:
    _register()
elif "torch" not in sys.modules:
    sys.meta_path.insert(0, _AfterTorch())


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    importlib.import_module("mxcompile.ops")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
