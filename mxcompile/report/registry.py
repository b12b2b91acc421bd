"""The reports of this process, one per model, oldest first.

A report grows while its model is compiled: by frame, by graph, and, where backward is lowered late, by
kernel. `reports` returns the present state. A report file is written after each change. If a write is slow,
as with hundreds of graphs, the next write waits for a pause, or for the end of a call, a backward or the
process. A file that cannot be written causes a warning and no error, because it must not stop a training run.
"""

from __future__ import annotations

import atexit
import copy
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mxcompile.report.data.fold import grouped
from mxcompile.report.data.record import NOT_COMPILED, GemmRecord, Part
from mxcompile.report.files import is_mine, of_rank
from mxcompile.report.merge import latest
from mxcompile.report.report import Report

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger("mxcompile.report")


class Ledger:
    """One compile of one frame: its parts, one per graph, and the path of its report file.

    group: key of the compile options. model: model that the frame belongs to, if known; the frames of one
    model and group form one report. phase: training steps of the policy, as text. frame: key of the compiled
    code, set by the registry. path: path with the rank substituted for ``{rank}``, None on ranks that do not
    write the file.
    """

    def __init__(
        self,
        *,
        target: str,
        policy: str,
        phase: str = "",
        path: Path | None = None,
        group: str = "",
        model: nn.Module | None = None,
    ) -> None:
        self.target = target
        self.policy = policy
        self.phase = phase
        self.path = of_rank(path) if path is not None and is_mine(path) else None
        self.group = group
        self.model = None if model is None else _reference(model)
        self.frame: object = None
        self.parts: list[Part] = []

    def for_model(self, model: nn.Module) -> Ledger:
        """Returns an empty ledger of the same compile for `model`."""
        other = copy.copy(self)
        other.model, other.parts = _reference(model), []
        return other


def _reference(model: nn.Module) -> weakref.ref[nn.Module]:
    """Returns a weak reference to `model`, usable as a key after the model is gone."""
    reference = weakref.ref(model)
    hash(reference)  # caches the hash: a dead weak reference cannot be hashed
    return reference


_SHARED = (
    "models with layers of the same names share the report file {!r}, which has only the last of these:"
    " give each model a path of its own"
)
_SLOW_S = 0.1
_PAUSE = 10
"""After a write slower than `_SLOW_S` seconds, the file is not written for `_PAUSE` times that duration."""


class Registry:
    """The reports of all compiles of this process, in parts: a `Ledger` for each compile."""

    def __init__(self) -> None:
        self._ledgers: dict[object, Ledger] = {}
        self._plans: dict[tuple[weakref.ref[nn.Module], str], tuple[tuple[GemmRecord, ...], str]] = {}
        self._notes: dict[tuple[object, str], dict[str, None]] = {}
        self._failing: set[Path] = set()
        self._shared: set[Path] = set()
        self._stale: set[Path] = set()
        self._next_write: dict[Path, float] = {}
        self._lock = threading.RLock()

    def open(self, key: object, fresh: Ledger) -> Ledger:
        """Returns the ledger of the compile `key`, such as a Dynamo context; stores `fresh` for a new key."""
        with self._lock:
            if fresh.frame is None:
                fresh.frame = getattr(getattr(key, "compile_id", None), "frame_id", None)
            return self._ledgers.setdefault(key, fresh)

    def plan(self, model: nn.Module, group: str, gemms: Sequence[GemmRecord], note: str = "") -> None:
        """Stores the planned GEMMs of `model`, which reports show before they are compiled, and a warning."""
        with self._lock:
            self._plans[_reference(model), group] = tuple(gemms), note
            self._rewrite(self._same(group, model=model))

    def note(self, text: str, group: str, *, model: nn.Module | None, frame: object) -> None:
        """Adds the warning `text` to the report of `model` or, if that is None, of the code `frame`."""
        with self._lock:
            self._notes.setdefault((frame if model is None else _reference(model), group), {})[text] = None
            self._rewrite(self._same(group, model=model, frame=frame))

    def parts(self, group: str, *, model: nn.Module | None = None, frame: object = None) -> list[Part]:
        """Returns the compiled parts of `model` or, if that is None, of the code `frame`."""
        with self._lock:
            return [part for ledger in self._same(group, model=model, frame=frame) for part in ledger.parts]

    def _same(self, group: str, *, model: nn.Module | None, frame: object = None) -> list[Ledger]:
        same = [ledger for ledger in self._ledgers.values() if ledger.group == group]
        if model is None:
            return [ledger for ledger in same if ledger.frame == frame]
        whose = _reference(model)
        return [ledger for ledger in same if ledger.model == whose]

    def put(self, ledger: Ledger, index: int | None, part: Part) -> int:
        """Sets part `index` of `ledger`, or appends it for None, and writes the file. Returns the index."""
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
        for path in {ledger.path for ledger in ledgers if ledger.path is not None}:
            self._stale.add(path)
            if time.monotonic() >= self._next_write.get(path, 0.0):
                self._write(path)

    def flush(self) -> None:
        """Writes the files of all reports that changed since their last write."""
        with self._lock:
            for path in [*self._stale]:
                self._write(path)

    def _write(self, path: Path) -> None:
        """Writes the report of the ledgers with the report file `path`. Logs a warning on failure."""
        same = [ledger for ledger in self._ledgers.values() if ledger.path == path]
        phase = next((ledger.phase for ledger in reversed(same) if ledger.phase), "")
        same = [ledger for ledger in same if ledger.phase in ("", phase)]
        self._stale.discard(path)
        start = time.monotonic()
        try:
            shown = self._of_one_report(same)
            note = _SHARED.format(str(path)) if len(shown) < len(same) else ""
            if note and path not in self._shared:
                log.warning("%s", note)
                self._shared.add(path)
            self._report(shown, note).save(path)
        except Exception as error:  # no failure of a report may stop compilation or training
            if path not in self._failing:
                log.warning("cannot write the report: %s; the model runs without a report", error)
            self._failing.add(path)
        else:
            self._failing.discard(path)
        end = time.monotonic()
        self._next_write[path] = end + _PAUSE * (end - start) if end - start > _SLOW_S else end

    def _of_one_report(self, ledgers: Sequence[Ledger]) -> list[Ledger]:
        """Returns `ledgers` without the models that have layers of the same names as a later model.

        Blocks that were compiled one by one have names of the whole model, so they stay together.
        """
        models = grouped(ledgers, lambda ledger: ledger.model)
        if len(models) == 1:
            return [*ledgers]
        kept, names = set[object](), set[str]()
        for model, same in reversed(models.items()):
            gemms = (gemm for ledger in same for part in ledger.parts for gemm in part.gemms)
            layers = {gemm.name for gemm in gemms if gemm.name and model is not None}
            if names.isdisjoint(layers):
                kept.add(model)
                names |= layers
        return [ledger for ledger in ledgers if ledger.model in kept]

    def _report(self, ledgers: Sequence[Ledger], note: str = "") -> Report:
        """Returns the report of `ledgers`, which share target and policy. note: another warning for it."""
        last = ledgers[-1]
        keys = [(ledger.model, ledger.group) for ledger in ledgers if ledger.model is not None]
        plans = [self._plans[key] for key in keys if key in self._plans]
        planned = dict.fromkeys(gemm for gemms, _ in plans for gemm in gemms)
        notes = dict.fromkeys((note, *(note for _, note in plans)))
        for ledger in ledgers:
            notes |= self._notes.get((ledger.model or ledger.frame, ledger.group), {})
        return Report.from_parts(
            latest([(ledger.frame, ledger.parts) for ledger in ledgers]),
            target=last.target,
            policy=last.policy,
            planned=tuple(planned),
            notes=tuple(filter(None, notes)),
        )

    def knows(self, model: nn.Module, group: str) -> bool:
        """Whether a compile of `model` under the options `group` exists."""
        with self._lock:
            return bool(self._same(group, model=model))

    def pending(self, model: nn.Module, group: str) -> list[GemmRecord]:
        """Returns the GEMMs planned for `model` under the options `group` that no compiled graph contains."""
        with self._lock:
            same = self._same(group, model=model)
            gemms = self._report(same).gemms if same else ()
            return [gemm for gemm in gemms if gemm.kernel == NOT_COMPILED]

    def layers(self, group: str) -> list[GemmRecord]:
        """Returns the records of all ledgers of `group`."""
        with self._lock:
            same = [ledger for ledger in self._ledgers.values() if ledger.group == group]
            return [gemm for ledger in same for part in ledger.parts for gemm in part.gemms]

    def reports(self) -> list[Report]:
        """Returns one report per model and options, oldest first, and one per frame without a known model."""
        with self._lock:
            models: dict[object, list[Ledger]] = {}
            for key, ledger in self._ledgers.items():
                whose = (ledger.model, ledger.group, ledger.target) if ledger.model is not None else key
                models.setdefault(whose, []).append(ledger)
            return [self._report(ledgers) for ledgers in models.values()]

    def clear(self) -> None:
        """Removes all reports. Plans of live models stay."""
        with self._lock:
            self._ledgers.clear()
            self._notes.clear()
            self._plans = {key: plan for key, plan in self._plans.items() if key[0]() is not None}
            self._failing.clear()
            self._shared.clear()
            self._stale.clear()


REGISTRY = Registry()
atexit.register(REGISTRY.flush)


def reports() -> list[Report]:
    """Returns the reports of everything that this process compiled.

    Returns:
        One report per model and set of compile options, oldest first.
    """
    return REGISTRY.reports()


def clear_reports() -> None:
    """Removes all reports of this process."""
    REGISTRY.clear()


def gather_reports() -> list[Report]:
    """Returns the reports of all ranks, merged by model.

    This is a collective of the default process group: call it on every rank. The n-th reports of all ranks
    must belong to the same model (see `Report.merged`).

    Returns:
        The same merged reports on every rank. Without a process group, the reports of this process.

    Raises:
        OptionError: if ranks compiled with different targets or policies.
    """
    from torch import distributed

    mine = reports()
    if not (distributed.is_available() and distributed.is_initialized()):
        return mine
    texts: list[list[str]] = [[] for _ in range(distributed.get_world_size())]
    distributed.all_gather_object(texts, [report.to_json() for report in mine])
    by_position = itertools.zip_longest(*texts)
    return [Report.merged([Report.from_json(text) for text in same if text]) for same in by_position]
