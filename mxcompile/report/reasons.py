"""Why layers have their roles, folded: what ``Report.why`` returns and ``mxcompile explain --why`` prints."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mxcompile.errors import OptionError
from mxcompile.policy import Match
from mxcompile.report.fold import fold
from mxcompile.report.record import GemmRecord

_MOST = 3
"""How many names are shown in place of one that does not exist."""
_NEAR = 0.5
"""How alike two names are for one to be a slip of the other (difflib's ratio)."""


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
    """The reasons of the layers of `gemms` whose names `pattern` fits, in the order of the model.

    Raises `OptionError` for a pattern that fits none or is not a regular expression.
    """
    match, gemms = Match(name=(pattern,)), tuple(gemms)
    try:
        rows = fold(gemm for gemm in gemms if match.names(gemm.name))
    except (re.error, OverflowError, RecursionError) as error:
        raise OptionError(f"{pattern!r} is not a regular expression: {error}") from None
    if not rows:
        raise OptionError(_fits_none(pattern, tuple(dict.fromkeys(gemm.name for gemm in gemms))))
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


def _fits_none(pattern: str, names: Sequence[str]) -> str:
    """Returns a message on a pattern that fits none of `names`, with patterns that would and near names."""
    message = f"no layer of the report is called {pattern!r}"
    if not names:
        return f"{message}: it has no layers"
    for wider in (f"{pattern}.*", f"*.{pattern}", f"*.{pattern}.*"):
        match = Match(name=(wider,))
        fitting = [] if pattern.startswith("re:") else [name for name in names if match.names(name)]
        if fitting:
            more = f" and {len(fitting) - 1} more" if len(fitting) > 1 else ""
            return f"{message}; {wider!r} fits {fitting[0]!r}{more}"
    near = difflib.get_close_matches(pattern.removeprefix("re:"), names, n=_MOST, cutoff=_NEAR)
    rows = [row for row in near if row] or [name for name in names if name][:_MOST]
    what = "nearest" if near else "there are"
    return f"{message}; {what}: {', '.join(map(repr, rows))}"
