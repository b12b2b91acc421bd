"""The reasons for the roles of layers, with equal layers folded, for ``Report.why`` and ``explain --why``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mxcompile.errors import OptionError
from mxcompile.policy import Match
from mxcompile.report.data.fold import fold
from mxcompile.report.data.record import GemmRecord
from mxcompile.report.forms.words import listed

_MOST = 3
"""Number of existing names that an error suggests."""
_NEAR = 0.5
"""Least similarity (difflib's ratio) of a suggested name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reasons:
    """Equal layers and the evidence for their role.

    name: folded name. names: names of all layers. role, precision, reason: fields of the forward
    `GemmRecord`. evidence, nearest: fields of the first layer's record.
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
    """Returns the reasons of the layers of `gemms` whose names match `pattern`, in the order of the model.

    Raises `OptionError` for a pattern that matches no layer or is not a regular expression.
    """
    match, gemms = Match(name=(pattern,)), tuple(gemms)
    try:
        rows = fold(gemm for gemm in gemms if match.names(gemm.name))
    except (re.error, OverflowError, RecursionError) as error:
        raise OptionError(f"{pattern!r} is not a regular expression: {error}") from None
    if not rows:
        raise OptionError(_no_match_message(pattern, tuple(dict.fromkeys(gemm.name for gemm in gemms))))
    fields = ("role", "precision", "reason", "evidence", "nearest")
    return tuple(
        Reasons(name=row.name, names=row.names, **{field: getattr(row.gemms[0], field) for field in fields})
        for row in rows
    )


def _no_match_message(pattern: str, names: Sequence[str]) -> str:
    """Returns an error message with wider patterns that match some of `names`, or else with similar names."""
    message = f"no layer of the report matches {pattern!r}"
    if not names:
        return f"{message}: it has no layers"
    for wider in (f"{pattern}.*", f"*.{pattern}", f"*.{pattern}.*"):
        match = Match(name=(wider,))
        fitting = [] if pattern.startswith("re:") else [name for name in names if match.names(name)]
        if fitting:
            return f"{message}; {wider!r} matches {listed([*map(repr, fitting)], 1)}"
    near = difflib.get_close_matches(pattern.removeprefix("re:"), names, n=_MOST, cutoff=_NEAR)
    rows = [row for row in near if row] or [name for name in names if name][:_MOST]
    heading = "nearest" if near else "its layers are"
    return f"{message}; {heading}: {', '.join(map(repr, rows))}"
