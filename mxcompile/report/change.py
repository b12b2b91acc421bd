"""The data of a comparison of two reports: what changed, by layer and in the summary."""

from __future__ import annotations

from dataclasses import dataclass

from mxcompile.report.record import Summary

KINDS = ("fell back", "gained", "changed", "new", "removed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One change that layers have in common.

    kind: see `KINDS`. names: full module paths. role: of the layers, now. gemms: "fprop", "dgrad", "wgrad",
    those that changed. what: which of precision, role, formats, kernel, reason and size it is, "" for new and
    removed. before, after: its values, "" where there was or is none. code: of the reason for the present
    precision (see `mxcompile.policy.Reason`). reason: the sentence of the first layer, and how many others
    there are.
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
    """Everything that changed between two reports, in no form.

    changes: those of layers, by kind. words: the precisions of both reports, as texts say them. old, new: the
    summaries. is_unrelated: whether both have layers, and none is in both.
    """

    changes: tuple[Change, ...]
    words: str
    old: Summary
    new: Summary
    is_unrelated: bool = False

    @property
    def fell_back(self) -> tuple[str, ...]:
        """Names of the layers with a GEMM that was quantized and is in BF16."""
        names = (name for change in self.changes if change.kind == "fell back" for name in change.names)
        return tuple(dict.fromkeys(names))

    @property
    def share_drop(self) -> float:
        """By how much the quantized share of the FLOPs fell, 0 to 1; negative if it rose."""
        return self.old.flop_share - self.new.flop_share
