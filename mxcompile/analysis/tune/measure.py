"""What tuning asks of a run of the model."""

from __future__ import annotations

from collections.abc import Callable

from mxcompile.analysis.audit import Run, Session
from mxcompile.analysis.audit.interpreter import Key
from mxcompile.analysis.tune.bounds import Bounds
from mxcompile.formats import is_quantized
from mxcompile.report import Report
from mxcompile.report.numerics import lowest


def quantizes(report: Report, bounds: Bounds) -> bool:
    """Whether anything is left for the bounds to be about."""
    left = {gemm.gemm for gemm in report.gemms if is_quantized(gemm.precision)}
    return "fprop" in left if bounds.max_loss_gap is not None else bool(left)


def lowest_sqnr(session: Session, quantized: Callable[[Key], bool]) -> dict[Key, float]:
    """SQNR of the quantized GEMMs of one run, the worst of those of one name, in the order they ran."""
    run = Run(quantized=quantized, observe=True)
    session.run(run, backward=True)
    found: dict[Key, list[float]] = {}
    for index, stats in run.products.items():
        found.setdefault(session.sites.products[index].key, []).append(stats.sums.sqnr_db)
    return {key: lowest(values) for key, values in found.items()}
