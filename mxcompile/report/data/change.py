"""The data of a comparison of two reports: the changes of layers and of the summary."""

from __future__ import annotations

from dataclasses import dataclass

from mxcompile.report.data.record import Summary

KINDS = ("fell back", "gained", "changed", "new", "removed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One change that several layers share.

    kind: see `KINDS`. names: full module paths. role: role of the layers in the new report. gemms: "fprop",
    "dgrad", "wgrad", the GEMMs that changed. what: the changed field (precision, role, formats, kernel,
    reason or size), "" for new and removed layers. before, after: values of the field, "" where a report
    lacks it. code: code of the reason for the new precision (see `mxcompile.policy.Reason`). reason: the
    reason of the first layer, and the number of layers with other reasons.
    """

    kind: str
    names: tuple[str, ...]
    role: str
    gemms: tuple[str, ...]
    what: str
    before: str
    after: str
    code: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """All changes between two reports, independent of the output form.

    changes: changes of layers, sorted by kind. words: names of the precisions in both reports, for texts.
    old, new: the summaries. is_unrelated: whether both reports have layers but share none.
    """

    changes: tuple[Change, ...]
    words: str
    old: Summary
    new: Summary
    is_unrelated: bool = False

    @property
    def fell_back(self) -> tuple[str, ...]:
        """Names of layers with a GEMM that was quantized in the old report and is BF16 in the new report."""
        names = (name for change in self.changes if change.kind == "fell back" for name in change.names)
        return tuple(dict.fromkeys(names))

    @property
    def share_drop(self) -> float:
        """Decrease of the quantized share of the FLOPs, −1 to 1; negative if the share rose."""
        return self.old.flop_share - self.new.flop_share
