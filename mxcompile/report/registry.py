"""The reports of this process: what was compiled, oldest first.

A report grows while its model is compiled: graph by graph, and, where backward is lowered late, kernel by
kernel. `reports` gives the state of the moment.
"""

from __future__ import annotations

import threading
from pathlib import Path

from mxcompile.report.record import GemmRecord, Part
from mxcompile.report.report import Report


class Ledger:
    """One report in the making: the parts of a compiled frame, by graph, and the file it is kept in.

    group: equal for frames compiled with equal options, which may be parts of one model.
    """

    def __init__(self, *, target: str, policy: str, path: Path | None = None, group: str = "") -> None:
        self.target = target
        self.policy = policy
        self.path = path
        self.group = group
        self.parts: list[Part] = []

    def report(self) -> Report:
        """The report as far as it is known."""
        return Report.of(self.parts, target=self.target, policy=self.policy)


class Registry:
    """All ledgers of the process, by the frame they belong to."""

    def __init__(self) -> None:
        self._ledgers: dict[object, Ledger] = {}
        self._lock = threading.RLock()

    def open(self, key: object, fresh: Ledger) -> Ledger:
        """The ledger of the frame `key`, `fresh` if it has none yet."""
        with self._lock:
            return self._ledgers.setdefault(key, fresh)

    def put(self, ledger: Ledger, index: int | None, part: Part) -> int:
        """Set part `index` of `ledger`, or append it for None; rewrite the ledger's file."""
        with self._lock:
            if index is None:
                ledger.parts.append(part)
                index = len(ledger.parts) - 1
            else:
                ledger.parts[index] = part
            if ledger.path is not None:
                self._write(ledger.path)
            return index

    def _write(self, path: Path) -> None:
        """Write all that was compiled with the report file `path` to it."""
        same = [ledger for ledger in self._ledgers.values() if ledger.path == path]
        parts = [part for ledger in same for part in ledger.parts]
        Report.of(parts, target=same[-1].target, policy=same[-1].policy).save(path)

    def layers(self, group: str) -> list[GemmRecord]:
        """The records of all ledgers of `group`."""
        with self._lock:
            same = [ledger for ledger in self._ledgers.values() if ledger.group == group]
            return [gemm for ledger in same for part in ledger.parts for gemm in part.gemms]

    def reports(self) -> list[Report]:
        """All reports, oldest first."""
        with self._lock:
            return [ledger.report() for ledger in self._ledgers.values()]

    def clear(self) -> None:
        """Forget all reports."""
        with self._lock:
            self._ledgers.clear()


REGISTRY = Registry()


def reports() -> list[Report]:
    """The reports of what this process compiled, oldest first; one per compiled frame."""
    return REGISTRY.reports()


def clear_reports() -> None:
    """Forget the reports of this process."""
    REGISTRY.clear()
