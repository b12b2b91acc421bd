"""Why layers have their roles, folded: what ``Report.why`` returns and ``mxcompile explain --why`` prints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mxcompile.policy import Match
from mxcompile.report.fold import fold
from mxcompile.report.record import GemmRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Reasons:
    """Equal layers and what their role rests on.

    name: folded, of all. names: of each. role, precision, reason: see `GemmRecord`, of the forward GEMM.
    evidence, nearest: of the first layer.
    """

    name: str
    names: tuple[str, ...]
    role: str
    precision: str
    reason: str
    evidence: str
    nearest: str

    def __str__(self) -> str:
        times = f" ×{len(self.names)}" if len(self.names) > 1 else ""
        lines = [f"{self.name or '(root)'}{times}: {self.role}, {self.precision} ({self.reason})"]
        lines += [f"  because  {self.evidence}"] if self.evidence else []
        lines += [f"  nearest  {self.nearest}"] if self.nearest else []
        return "\n".join(lines)


def reasons(gemms: Iterable[GemmRecord], pattern: str) -> tuple[Reasons, ...]:
    """The reasons of the layers of `gemms` whose names `pattern` fits, in the order of the model."""
    match = Match(name=(pattern,))
    rows = fold(gemm for gemm in gemms if match.names(gemm.name))
    return tuple(
        Reasons(
            name=row.name,
            names=row.names,
            role=row.gemms[0].role,
            precision=row.gemms[0].precision,
            reason=row.gemms[0].reason,
            evidence=row.gemms[0].evidence,
            nearest=row.gemms[0].nearest,
        )
        for row in rows
    )
