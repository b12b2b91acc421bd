"""Where samples go: a file of JSON lines, or whatever takes a sample.

    {"schema": 1, "kind": "run", …}             once for each start
    {"schema": 1, "kind": "sample", "step": 100, "time": …, "ranks": 1, "rows": [{"layer": …, …}, …]}

A line is written by one system call at the end of the file, so that a process that is killed leaves all lines
before. A line that is cut is finished by a line end when the file is opened again, and left out by `read`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mxcompile.watch.tally import NUMBERS

SCHEMA = 1

Record = dict[str, Any]
Writer = Callable[[Record], object]


class JsonLines:
    """Appends records to the file at `path`, which is made with its folder when the first one comes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_begun = False

    def __call__(self, record: Record) -> None:
        """Append `record`. Raises `OSError`."""
        line = json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if not self._is_begun and _is_cut(file):
                line = f"\n{line}"
            data = line.encode()
            written = os.write(file, data)
            if written < len(data):
                self._is_begun = False  # the line is cut
                raise OSError(f"only {written:,} of {len(data):,} bytes were written")
            self._is_begun = True
        finally:
            os.close(file)

    def __repr__(self) -> str:
        return str(self.path)


class TensorBoard:
    """Adds the statistics of each sample to `writer`, a ``SummaryWriter``: layer/gemm/operand/statistic."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def __call__(self, record: Record) -> None:
        """Add `record`, if it is a sample."""
        for row in record.get("rows", ()):
            place = f"{row['layer']}/{row['gemm']}/{row['operand']}"
            numbers = ((name, row[name]) for name in NUMBERS if row.get(name) is not None)
            for name, value in numbers:
                self._writer.add_scalar(f"{place}/{name}", value, record["step"])

    def __repr__(self) -> str:
        return repr(self._writer)


def _is_cut(file: int) -> bool:
    """Whether the last line of `file` has no end."""
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"


def read(path: str | Path) -> Iterator[Record]:
    """The records in the file at `path`, oldest first, without lines that are cut. Raises `OSError`."""
    for record, _ in read_from(Path(path), 0):
        yield record


def read_from(path: Path, start: int) -> Iterator[tuple[Record, int]]:
    """The records behind byte `start` of the file at `path`, as `read` gives them, and where each ends."""
    with path.open("rb") as lines:
        lines.seek(start)
        for line in lines:
            start += len(line)
            record = parsed(line.decode(errors="replace"))
            if record is not None:
                yield record, start


def parsed(line: str) -> Record | None:
    """The record in `line`; None if the line is cut or of another schema."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and record.get("schema") == SCHEMA else None
