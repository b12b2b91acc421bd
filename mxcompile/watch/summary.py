"""A summary of a file of samples: the worst operands, the most changed operands, and an HTML page.

worst    NaN and Inf first, then by the relative error of the cast
moved    by the largest change of a share: underflow, saturated, error, changed
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from pathlib import Path
from typing import Any

from mxcompile.errors import OptionError
from mxcompile.report.forms.tables import drawn
from mxcompile.watch.tally import NUMBERS, Key
from mxcompile.watch.writers import Record, read_from

Row = dict[str, Any]

SHARES = ("underflow", "saturated", "error", "changed")
DRAWN = tuple(dict.fromkeys((*SHARES, "sqnr", *NUMBERS)))
"""The statistics, in the order of the page."""

_PAGE = Path(__file__).parent / "page.html"
_DATA = "/*data*/null"


@dataclass(kw_only=True, slots=True)
class SampleFile:
    """The content of a file of samples.

    samples: rows of operands by step; a repeated step replaces the earlier one. losses: losses by step, where
    recorded. end: byte position up to which the file was read.
    """

    path: Path
    about: Record = field(default_factory=dict)
    samples: dict[int, dict[Key, Row]] = field(default_factory=dict)
    losses: dict[int, float | None] = field(default_factory=dict)
    findings: list[Record] = field(default_factory=list)
    end: int = 0

    @classmethod
    def load(cls, path: Path) -> SampleFile:
        """Returns the records of the file `path`. Raises `OptionError` if it has none or cannot be read."""
        file = cls(path=path)
        try:
            file._read_on()
        except OSError as error:
            raise OptionError(f"samples {str(path)!r} cannot be read: {error.strerror or error}") from None
        if not file.samples and not file.findings:
            raise OptionError(
                f"samples {str(path)!r}: the file has no sample; Watch({str(path)!r}) writes them"
            )
        return file

    def has_grown(self) -> bool:
        """Whether the file had new records, which are now read. A missing file counts as unchanged."""
        try:
            return self._read_on()
        except OSError:
            return False

    def _read_on(self) -> bool:
        """Reads the records after `end`. Returns whether there were any. Raises `OSError`.

        A file shorter than `end` was replaced by another file, so it is read from the start.
        """
        start = self.end
        if self.path.stat().st_size < start:
            self.about, self.samples, self.losses, self.findings, start = {}, {}, {}, [], 0
        self.end = start
        for record, end in read_from(self.path, start):
            self.end = end
            if record.get("kind") == "run":
                self.about = record
            elif record.get("kind") == "sample":
                rows = {(row["layer"], row["gemm"], row["operand"]): row for row in record["rows"]}
                self.samples[record["step"]] = rows
                self.losses |= {record["step"]: record["loss"]} if "loss" in record else {}
            elif record.get("kind") == "nonfinite":
                self.findings.append(record)
        self.samples = dict(sorted(self.samples.items()))
        return self.end > start

    def worst(self, limit: int) -> list[tuple[Key, Row]]:
        """Returns the worst `limit` operands of the last sample."""
        return nlargest(limit, self._last().items(), lambda item: _badness(item[1]))

    def moved(self, limit: int, back: int) -> list[tuple[Key, Row, Row]]:
        """Returns key, row before and row now of the `limit` operands that changed most in `back` samples."""
        steps = [*self.samples]
        if len(steps) < 2:
            return []
        before = self.samples[steps[max(0, len(steps) - 1 - back)]]
        both = ((key, before[key], row) for key, row in self._last().items() if key in before)
        changed = ((key, then, now) for key, then, now in both if _change(then, now) > 0)
        return nlargest(limit, changed, lambda row: _change(*row[1:]))

    def _last(self) -> dict[Key, Row]:
        return next(reversed(self.samples.values()), {})

    def page(self) -> str:
        """Returns a self-contained HTML page: a map of operands and steps for every statistic."""
        keys = list(dict.fromkeys(key for rows in self.samples.values() for key in rows))
        named = [name for name in DRAWN if any(name in row for row in self._last().values())]
        numbers = {
            name: [[_rounded(rows.get(key, {}).get(name)) for rows in self.samples.values()] for key in keys]
            for name in named
        }
        data = {
            "title": self.path.name,
            "policy": self.about.get("policy", ""),
            "steps": [*self.samples],
            "operands": keys,
            "numbers": numbers,
            "losses": [_rounded(self.losses.get(step)) for step in self.samples] if self.losses else [],
            "findings": self.findings,
        }
        text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
        return _PAGE.read_text(encoding="utf-8").replace(_DATA, text)


def _badness(row: Row) -> tuple[float, ...]:
    return float(row.get("nan", 0) + row.get("inf", 0)), row.get("error") or 0.0, row.get("underflow") or 0.0


def _change(before: Row, now: Row) -> float:
    pairs = ((before.get(name), now.get(name)) for name in SHARES)
    return max((abs(b - a) for a, b in pairs if a is not None and b is not None), default=0.0)


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def lines(file: SampleFile, limit: int, back: int) -> Iterable[str]:
    """Yields the lines of `file` for a terminal."""
    steps = [*file.samples]
    if steps:
        yield (
            f"{file.path.name}: {len(steps)} samples, steps {steps[0]:,} to {steps[-1]:,},"
            f" {len(file.samples[steps[-1]])} operands, {file.about.get('policy', 'unknown policy')}"
        )
    for finding in file.findings[-limit:]:
        operand = f"{finding['operand']} of {finding['layer']} {finding['gemm']}"
        yield f"step {finding['step']:,}: NaN or Inf in {operand}, {finding['origin']}"
    if not steps:
        return
    yield ""
    yield _table(f"worst at step {steps[-1]:,}", [(key, None, row) for key, row in file.worst(limit)])
    if moved := file.moved(limit, back):
        yield ""
        yield _table(f"changed most since step {steps[max(0, len(steps) - 1 - back)]:,}", moved)


_COLUMNS = {"sqnr": "SQNR dB", "underflow": "underflow", "saturated": "saturated", "changed": "changed"}


def _table(title: str, rows: Sequence[tuple[Key, Row | None, Row]]) -> str:
    table = [[title, *_COLUMNS.values(), "NaN + Inf"]]
    for key, before, now in rows:
        cells = (_cell(name, before, now) for name in _COLUMNS)
        table.append([" ".join(key), *cells, f"{now.get('nan', 0) + now.get('inf', 0):,}"])
    return drawn(table, "plain", colalign=("left", *["right"] * (len(_COLUMNS) + 1)))


def _cell(name: str, before: Row | None, now: Row) -> str:
    rows = [now] if before is None or before.get(name) == now.get(name) else [before, now]
    form = "{:.1f}" if name == "sqnr" else "{:.2%}"
    return " → ".join("-" if row.get(name) is None else form.format(row[name]) for row in rows)
