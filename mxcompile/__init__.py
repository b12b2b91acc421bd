"""torch.compile(model, backend="mxfp8"): train and serve PyTorch models in OCP MXFP8.

Importing this package imports nothing else and changes nothing: each public name is loaded at its first
use. The first use of any name also registers the operators of ``torch.ops.mx``, and `MXTensor` with torch. A
script that only loads a saved graph or an `MXTensor` therefore needs ``from mxcompile import MXTensor``.

Dynamo finds the backend by the entry point of the installed package. A checkout on ``sys.path`` has no entry
point, so importing it registers the backend's name.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mxcompile.analysis.audit import Audit as Audit
    from mxcompile.analysis.audit import audit as audit
    from mxcompile.analysis.blame import blame as blame
    from mxcompile.analysis.compare import compare as compare
    from mxcompile.analysis.explain.explainer import explain as explain
    from mxcompile.analysis.explain.rank import explain_rank as explain_rank
    from mxcompile.analysis.explain.rank import sweep_meshes as sweep_meshes
    from mxcompile.analysis.tune import tune as tune
    from mxcompile.checkpoint.export import ExportedWeights as ExportedWeights
    from mxcompile.checkpoint.export import export_weights as export_weights
    from mxcompile.checkpoint.load import load_quantized as load_quantized
    from mxcompile.checkpoint.package import save_package as save_package
    from mxcompile.checkpoint.packaged_model import PackagedModel as PackagedModel
    from mxcompile.checkpoint.packaged_model import load_package as load_package
    from mxcompile.checkpoint.save import save_quantized as save_quantized
    from mxcompile.compiler.backend import Backend as Backend
    from mxcompile.compiler.calls.delayed_scales import reduce_histories as reduce_histories
    from mxcompile.compiler.front import compile as compile  # noqa: A004
    from mxcompile.distributed import QuantizedGathers as QuantizedGathers
    from mxcompile.distributed import quantize_gathers_ as quantize_gathers_
    from mxcompile.mesh import RankReport as RankReport
    from mxcompile.mesh.sweep import MeshSweep as MeshSweep
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
    from mxcompile.watch import Watch as Watch

__version__ = "0.1.0"

_HOME = {
    name: f"mxcompile.{module}"
    for module, names in {
        "analysis.audit": "Audit audit",
        "analysis.blame": "blame",
        "analysis.compare": "compare",
        "analysis.explain.explainer": "explain",
        "analysis.explain.rank": "explain_rank sweep_meshes",
        "analysis.tune": "tune",
        "checkpoint.export": "ExportedWeights export_weights",
        "checkpoint.load": "load_quantized",
        "checkpoint.package": "save_package",
        "checkpoint.packaged_model": "PackagedModel load_package",
        "checkpoint.save": "save_quantized",
        "compiler.backend": "Backend",
        "compiler.calls.delayed_scales": "reduce_histories",
        "compiler.front": "compile",
        "distributed": "QuantizedGathers quantize_gathers_",
        "mesh": "RankReport",
        "mesh.sweep": "MeshSweep",
        "offline": "CodegenResult codegen",
        "policy": "Policy",
        "report": "GemmRecord Report clear_reports gather_reports reports",
        "serving": "StoredWeights aoti_configs quantize_weights_ static_cache",
        "storage": "MXTensor quantize",
        "watch": "Watch",
    }.items()
    for name in names.split()
}
"""The module of each public name."""

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    importlib.import_module("mxcompile.storage")  # registers the operators, too
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


def _register_backend() -> None:
    """Registers the backend's name with Dynamo, as the entry point of an installed package does."""
    try:
        from torch._dynamo.backends import registry
    except ImportError:  # without torch nothing is compiled
        return
    group, name = "torch_dynamo_backends", "mxfp8"
    entry = metadata.EntryPoint(name=name, value="mxcompile.compiler.backend:mxfp8", group=group)
    registry._BACKENDS.setdefault(name, entry)


try:
    metadata.distribution("mxcompile")
except metadata.PackageNotFoundError:
    _register_backend()
