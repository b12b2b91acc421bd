"""The costs of a layer's options: time, then bytes of the operands.

The time is an estimate of the layer's GEMMs and casts on a target (see `offline/record_work.py`), 0 if the
target has no data sheet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mxcompile.analysis.study.mixes import BF16, GEMMS, Option
from mxcompile.formats import is_quantized
from mxcompile.offline.record_work import estimate, operand_bytes
from mxcompile.report import GemmRecord, Report

Cost = tuple[float, float]
"""Estimated time in µs, bytes of the operands."""


class Costs:
    """The costs of options, from the reports of all candidates, which have the same GEMMs."""

    def __init__(self, reports: Sequence[Report], target: str) -> None:
        self._of: dict[tuple[str, int, str], Cost] = {}
        self._quantized: set[tuple[str, int, str]] = set()
        self.estimated = False
        for index, report in enumerate(reports):
            aimed = dataclasses.replace(report.summary, target=target)
            estimated = estimate(dataclasses.replace(report, summary=aimed))
            self.estimated = estimated.summary.estimate_us is not None
            for gemm in estimated.gemms:
                quantized, bf16 = operand_bytes(gemm)
                self._add(gemm, index, gemm.estimate_us, quantized)
                if not index:
                    self._add(gemm, BF16.candidate, gemm.estimate_bf16_us, bf16)

    def _add(self, gemm: GemmRecord, candidate: int, us: float | None, num_bytes: float) -> None:
        key = gemm.name, candidate, gemm.gemm
        before = self._of.get(key, (0.0, 0.0))
        self._of[key] = before[0] + (us or 0.0), before[1] + num_bytes
        if is_quantized(gemm.precision):
            self._quantized.add(key)

    def __call__(self, layer: str, option: Option) -> Cost:
        """Returns the cost of `layer` with `option`."""
        costs = [
            self._of.get((layer, BF16.candidate if gemm in option.kept else option.candidate, gemm), (0, 0))
            for gemm in GEMMS
        ]
        return round(sum(us for us, _ in costs), 6), sum(size for _, size in costs)

    def quantized(self, layer: str, candidate: int) -> frozenset[str]:
        """Returns the kinds of GEMMs of `layer` that the candidate quantizes."""
        return frozenset(gemm for gemm in GEMMS if (layer, candidate, gemm) in self._quantized)
