"""Writes artifacts to torch's structured trace (``TORCH_TRACE``), which tlparse renders as pages.

    mxcompile_before_passes, mxcompile_after_passes     the joint or inference graph as text
    mxcompile_report                                    a line for each GEMM: decision, kernel, reason

They appear beside the artifacts of Dynamo and Inductor for the same compile. The lines also go to the log
``mxcompile.report``. Without a trace and without this log no text is built.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import fx
from torch._logging._internal import trace_structured

from mxcompile.graph.printer import print_ir
from mxcompile.report import GemmRecord
from mxcompile.report.forms.words import length

log = logging.getLogger("mxcompile.report")


def trace_graph(graph: fx.Graph, when: str) -> None:
    """Writes `graph`. when: "before" or "after" the passes."""
    _add_artifact(f"mxcompile_{when}_passes", lambda: print_ir(graph))


def trace_gemms(gemms: Sequence[GemmRecord]) -> None:
    """Writes the records of one graph."""
    if log.isEnabledFor(logging.DEBUG):
        for gemm in gemms:
            log.debug("%s", _line(gemm))
    _add_artifact("mxcompile_report", lambda: "\n".join(_line(gemm) for gemm in gemms))


def _add_artifact(name: str, text: Callable[[], str]) -> None:
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)


def _line(gemm: GemmRecord) -> str:
    sizes = "x".join(map(length, (gemm.m, gemm.n, gemm.k)))
    return (
        f"{gemm.name} {gemm.gemm} [{gemm.role}] {sizes} {gemm.precision} {gemm.kernel or '-'}: {gemm.reason}"
    )
