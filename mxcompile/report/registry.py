"""The reports of this process: what was compiled, one report per model, oldest first.

A report grows while its model is compiled: frame by frame, graph by graph, and, where backward is lowered
late, kernel by kernel. `reports` gives the state of the moment. A file is written after each change, but if
writing takes long, as for hundreds of graphs, then only at the end of a call and of the process. A file that
cannot be written is warned about, never more: what a report is about is a training run.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mxcompile.report.files import is_mine, of_rank
from mxcompile.report.merge import latest
from mxcompile.report.record import NOT_COMPILED, GemmRecord, Part
from mxcompile.report.report import Report

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger("mxcompile.report")


class Ledger:
    """One compile of one frame: its parts, by graph, and the file they are kept in.

    group: equal for frames compiled with equal options. model: that the frame is a part of, if known; frames
    of one model and group make one report. frame: equal for compiles of the same code; set by the registry.
    path: with the rank for ``{rank}``, None where another rank writes it.
    """

    def __init__(
        self,
        *,
        target: str,
        policy: str,
        path: Path | None = None,
        group: str = "",
        model: nn.Module | None = None,
    ) -> None:
        self.target = target
        self.policy = policy
        self.path = of_rank(path) if path is not None and is_mine(path) else None
        self.group = group
        self.model = None if model is None else _reference(model)
        self.frame: object = None
        self.parts: list[Part] = []

    def of(self, model: nn.Module) -> Ledger:
        """One of the same compile for `model`, without parts."""
        other = Ledger(target=self.target, policy=self.policy, group=self.group, model=model)
        other.frame, other.path = self.frame, self.path
        return other


def _reference(model: nn.Module) -> weakref.ref[nn.Module]:
    """A key for `model` that does not keep it alive and outlives it."""
    reference = weakref.ref(model)
    hash(reference)  # it is remembered, and cannot be found once the model is gone
    return reference


_SLOW_S = 0.1
_PAUSE = 10
"""After a write that took longer than `_SLOW_S`, its file is left alone for `_PAUSE` times as long."""


class Registry:
    """All ledgers of the process, by the compile they belong to."""

    def __init__(self) -> None:
        self._ledgers: dict[object, Ledger] = {}
        self._planned: dict[tuple[weakref.ref[nn.Module], str], tuple[GemmRecord, ...]] = {}
        self._plan_notes: dict[tuple[weakref.ref[nn.Module], str], str] = {}
        self._notes: dict[tuple[object, str], dict[str, None]] = {}
        self._failing: set[Path] = set()
        self._stale: set[Path] = set()
        self._next_write: dict[Path, float] = {}
        self._lock = threading.RLock()

    def open(self, key: object, fresh: Ledger) -> Ledger:
        """The ledger of the compile `key`, a context of Dynamo's or anything else; `fresh` if it has none."""
        with self._lock:
            if fresh.frame is None:
                fresh.frame = getattr(getattr(key, "compile_id", None), "frame_id", None)
            return self._ledgers.setdefault(key, fresh)

    def plan(self, model: nn.Module, group: str, gemms: Sequence[GemmRecord], note: str = "") -> None:
        """All GEMMs of `model` under the options `group`, for reports to have before they are compiled.

        note: a warning for its report.
        """
        with self._lock:
            self._planned[_reference(model), group] = tuple(gemms)
            self._plan_notes[_reference(model), group] = note
            self._rewrite(self._same(group, model=model))

    def note(self, text: str, group: str, *, model: nn.Module | None, frame: object) -> None:
        """Put the warning `text` into the report of `model` or, if that is None, of the code `frame`."""
        with self._lock:
            self._notes.setdefault((frame if model is None else _reference(model), group), {})[text] = None
            self._rewrite(self._same(group, model=model, frame=frame))

    def parts(self, group: str, *, model: nn.Module | None = None, frame: object = None) -> list[Part]:
        """Returns what was compiled of `model` or, if that is None, of the code `frame`.

        group: of the options.
        """
        with self._lock:
            return [part for ledger in self._same(group, model=model, frame=frame) for part in ledger.parts]

    def _same(self, group: str, *, model: nn.Module | None, frame: object = None) -> list[Ledger]:
        same = [ledger for ledger in self._ledgers.values() if ledger.group == group]
        if model is None:
            return [ledger for ledger in same if ledger.frame == frame]
        whose = _reference(model)
        return [ledger for ledger in same if ledger.model == whose]

    def put(self, ledger: Ledger, index: int | None, part: Part) -> int:
        """Set part `index` of `ledger`, or append it for None; rewrite the ledger's file."""
        with self._lock:
            if index is None:
                ledger.parts.append(part)
                index = len(ledger.parts) - 1
            elif ledger.parts[index] == part:
                return index
            else:
                ledger.parts[index] = part
            self._rewrite([ledger])
            return index

    def _rewrite(self, ledgers: Sequence[Ledger]) -> None:
        for path in {ledger.path for ledger in ledgers} - {None}:
            assert path is not None
            self._stale.add(path)
            if time.monotonic() >= self._next_write.get(path, 0.0):
                self._write(path)

    def flush(self) -> None:
        """Write the files of all reports that have changed since."""
        with self._lock:
            for path in [*self._stale]:
                self._write(path)

    def _write(self, path: Path) -> None:
        """Write all that was compiled with the report file `path` to it, or warn."""
        same = [ledger for ledger in self._ledgers.values() if ledger.path == path]
        self._stale.discard(path)
        start = time.monotonic()
        try:
            self._report(same).save(path)
        except Exception as error:  # whatever it is, it must not end what is compiled
            if path not in self._failing:
                log.warning("the report is not written, and what is compiled goes on: %s", error)
            self._failing.add(path)
        else:
            self._failing.discard(path)
        end = time.monotonic()
        self._next_write[path] = end + _PAUSE * (end - start) if end - start > _SLOW_S else end

    def _report(self, ledgers: Sequence[Ledger]) -> Report:
        """The report of `ledgers`, which have one target and policy."""
        last = ledgers[-1]
        plans = [(ledger.model, ledger.group) for ledger in ledgers if ledger.model is not None]
        planned = dict.fromkeys(gemm for key in plans for gemm in self._planned.get(key, ()))
        notes = dict.fromkeys(self._plan_notes.get(key, "") for key in plans)
        for ledger in ledgers:
            notes |= self._notes.get((ledger.model or ledger.frame, ledger.group), {})
        return Report.of(
            latest([(ledger.frame, ledger.parts) for ledger in ledgers]),
            target=last.target,
            policy=last.policy,
            planned=tuple(planned),
            notes=tuple(filter(None, notes)),
        )

    def knows(self, model: nn.Module, group: str) -> bool:
        """Whether anything of `model` was compiled under the options `group`."""
        with self._lock:
            return bool(self._same(group, model=model))

    def pending(self, model: nn.Module, group: str) -> list[GemmRecord]:
        """Returns the GEMMs planned for `model` under the options `group` that no compiled graph has."""
        with self._lock:
            same = self._same(group, model=model)
            gemms = self._report(same).gemms if same else ()
            return [gemm for gemm in gemms if gemm.kernel == NOT_COMPILED]

    def layers(self, group: str) -> list[GemmRecord]:
        """The records of all ledgers of `group`."""
        with self._lock:
            same = [ledger for ledger in self._ledgers.values() if ledger.group == group]
            return [gemm for ledger in same for part in ledger.parts for gemm in part.gemms]

    def reports(self) -> list[Report]:
        """One report per model and options, oldest first; one per frame that belongs to no known model."""
        with self._lock:
            models: dict[object, list[Ledger]] = {}
            for key, ledger in self._ledgers.items():
                whose = (ledger.model, ledger.group, ledger.target) if ledger.model is not None else key
                models.setdefault(whose, []).append(ledger)
            return [self._report(ledgers) for ledgers in models.values()]

    def clear(self) -> None:
        """Forget all reports."""
        with self._lock:
            self._ledgers.clear()
            self._notes.clear()
            self._planned = {key: gemms for key, gemms in self._planned.items() if key[0]() is not None}
            self._plan_notes = {key: self._plan_notes[key] for key in self._planned}
            self._failing.clear()
            self._stale.clear()


REGISTRY = Registry()
atexit.register(REGISTRY.flush)


def reports() -> list[Report]:
    """The reports of what this process compiled, oldest first; one per model and set of options."""
    return REGISTRY.reports()


def clear_reports() -> None:
    """Forget the reports of this process."""
    REGISTRY.clear()


def gather_reports() -> list[Report]:
    """The reports of all ranks, merged: a collective of the default process group, with one result on all.

    The n-th reports of all ranks are of one model (see `Report.merged`). Without a process group these are
    the reports of this process. Raises `OptionError` where ranks compiled with other targets or policies.
    """
    from torch import distributed

    mine = reports()
    if not (distributed.is_available() and distributed.is_initialized()):
        return mine
    texts: list[list[str]] = [[] for _ in range(distributed.get_world_size())]
    distributed.all_gather_object(texts, [report.to_json() for report in mine])
    most = max(map(len, texts))
    by_position = [
        [Report.from_json(own[index]) for own in texts if index < len(own)] for index in range(most)
    ]
    return [Report.merged(same) for same in by_position]
