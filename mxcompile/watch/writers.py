"""Destinations of samples: a file of JSON lines, TensorBoard, or a callable.

    {"schema": 1, "kind": "run", …}             once per start
    {"schema": 1, "kind": "sample", "step": 100, "time": …, "ranks": 1, "rows": [{"layer": …, …}, …]}

One system call appends a line, so a killed process leaves all earlier lines intact. When a file with a
truncated last line is reopened, a newline is added first; `read` skips the truncated line.
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
    """Appends records to the file `path`. The first record creates the file and its folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_begun = False

    def __call__(self, record: Record) -> None:
        """Appends `record`. Raises `OSError`."""
        line = json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(file).st_size
            if not self._is_begun and size and os.pread(file, 1, size - 1) != b"\n":  # its last line is cut
                line = f"\n{line}"
            data = line.encode()
            written = os.write(file, data)
            if written < len(data):
                self._is_begun = False  # the line is truncated
                raise OSError(f"only {written:,} of {len(data):,} bytes were written")
            self._is_begun = True
        finally:
            os.close(file)

    def __repr__(self) -> str:
        return str(self.path)


class TensorBoard:
    """Adds the statistics of each sample to a ``SummaryWriter``, as layer/gemm/operand/statistic."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def __call__(self, record: Record) -> None:
        """Adds `record` if it is a sample."""
        for row in record.get("rows", ()):
            tag = f"{row['layer']}/{row['gemm']}/{row['operand']}"
            numbers = ((name, row[name]) for name in NUMBERS if row.get(name) is not None)
            for name, value in numbers:
                self._writer.add_scalar(f"{tag}/{name}", value, record["step"])

    def __repr__(self) -> str:
        return repr(self._writer)


def read(path: str | Path) -> Iterator[Record]:
    """Yields the records of the file `path`, oldest first, without truncated lines. Raises `OSError`."""
    for record, _ in read_from(Path(path), 0):
        yield record


def read_from(path: Path, start: int) -> Iterator[tuple[Record, int]]:
    """Yields the records after byte `start` of the file `path`, like `read`, with their end positions."""
    with path.open("rb") as lines:
        lines.seek(start)
        for line in lines:
            start += len(line)
            try:
                record = json.loads(line.decode(errors="replace"))
            except (ValueError, RecursionError):  # a truncated line, or one of something else
                continue
            if isinstance(record, dict) and record.get("schema") == SCHEMA:
                yield record, start
