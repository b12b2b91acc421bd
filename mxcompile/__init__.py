"""torch.compile(model, backend="mxfp8"): train and serve PyTorch models in OCP MXFP8.

Importing this package imports nothing else: every public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mxcompile.backend import Backend as Backend
    from mxcompile.explain import explain as explain
    from mxcompile.policy import Policy as Policy
    from mxcompile.report import GemmRecord as GemmRecord
    from mxcompile.report import Report as Report
    from mxcompile.report import clear_reports as clear_reports
    from mxcompile.report import reports as reports
    from mxcompile.tensor import MXTensor as MXTensor
    from mxcompile.tensor import quantize as quantize

__version__ = "0.1.0"

_HOME = {
    "Backend": "mxcompile.backend",
    "GemmRecord": "mxcompile.report",
    "MXTensor": "mxcompile.tensor",
    "Policy": "mxcompile.policy",
    "Report": "mxcompile.report",
    "clear_reports": "mxcompile.report",
    "explain": "mxcompile.explain",
    "quantize": "mxcompile.tensor",
    "reports": "mxcompile.report",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
