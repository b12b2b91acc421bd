"""Joins the samples of all ranks through the key-value store of the process group, without a collective.

    rank r: store[sample, r] = its tallies        rank 0: waits for them in a thread, joins, writes

Without rules no rank waits for another in a step. Rules are evaluated on the joined sample, and all ranks
must act in the same step, so at the end of a sampled step each rank waits for rank 0's result. A rank that
sends nothing in time, for example because it has no compiled layers, is skipped until it sends again. The
record contains the number of ranks.

    rank r: told += 1, store[told] = a record     rank 0: polls for records in the thread, writes them

Keys outlive their watch, so each has the name of the watch. The key of a sample has its step, and how often
the steps began again, because a run may resume from an earlier step or sample a step twice.
"""

from __future__ import annotations

import atexit
import json
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from mxcompile.watch.actions import Fired
from mxcompile.watch.tally import Sample, Tally, join
from mxcompile.watch.writers import Record

_PREFIX = "mxcompile_watch"
_WAIT_S = 60.0
_CLOSE_S = 120.0
_POLL_S = 0.02
_LOOK_S = 1.0

Written = Callable[[int, Sample, int], None]
Warn = Callable[[str, Exception], None]
Judge = Callable[[Sample], list[Fired]]


class Ranks:
    """The communication of the ranks of one watch.

    name: name of the watch, the same on all ranks. write: writes a sample on rank 0, called with step, sample
    and number of ranks. send: writes a record of any rank, on rank 0. judge: returns the rules that fire in a
    joined sample; None without rules.
    """

    def __init__(
        self,
        name: str,
        write: Written,
        warn: Warn,
        send: Callable[[Record], None],
        judge: Judge | None = None,
    ) -> None:
        self._prefix = f"{_PREFIX}/{name}"
        self._records = f"{self._prefix}/told"
        self._write = write
        self._warn = warn
        self._send = send
        self._judge = judge
        self._received = 0
        self._step, self._restarts = -1, 0
        self._queue: queue.Queue[tuple[str, int, Sample] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._silent: set[int] = set()
        self._sent_key = ""

    def gather(self, step: int, sample: Sample) -> list[Fired]:
        """Joins `sample` with the samples of the other ranks. Rank 0 writes the result.

        Returns the rules that fire in it, the same on all ranks.
        """
        rank, count = _rank_and_size()
        if count == 1:
            if sample:
                self._write(step, sample, 1)
            return self._judge(sample) if self._judge is not None else []
        self._restarts += step <= self._step
        self._step = step
        key = f"{self._prefix}/{self._restarts}/{step}"
        try:
            if rank:
                packed = [[cast, asdict(tally)] for cast, tally in sample.items()]
                _store().set(f"{key}/{rank}", json.dumps(packed))
                return self._receive_rules(key, step) if self._judge is not None else []
            if self._judge is not None:
                return self._rule(key, step, sample, self._judge)
            self.start()
            self._queue.put((key, step, sample))
        except Exception as error:
            self._warn("a sample did not reach the first rank", error)
        return []

    def send_to_first(self, record: Record) -> None:
        """Sends `record` to rank 0, which writes it."""
        rank, _ = _rank_and_size()
        if not rank:
            self._send(record)
            return
        try:
            number = _store().add(self._records, 1)
            _store().set(f"{self._records}/{number}", json.dumps(record))
        except Exception as error:
            self._warn(f"a {record['kind']} record did not reach the first rank", error)

    def close(self) -> None:
        """Waits until everything that this rank gathered is written."""
        thread, self._thread = self._thread, None
        if thread is not None:
            atexit.unregister(self.close)
            self._queue.put(None)
            thread.join(timeout=_CLOSE_S)

    def start(self) -> None:
        """Starts the thread that polls for records of other ranks, on rank 0 of several."""
        rank, count = _rank_and_size()
        if rank == 0 and count > 1 and self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="mxcompile-watch", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def _serve(self) -> None:
        is_open = True
        while is_open:
            item: tuple[str, int, Sample] | None
            try:
                item = self._queue.get(timeout=_LOOK_S)
                is_open = item is not None
            except queue.Empty:
                item = None
            try:
                if item is not None:
                    self._write_joined(*item)
                self._collect()
            except Exception as error:
                self._warn("a sample or a record of another rank was lost", error)

    def _collect(self) -> None:
        """Writes the records that other ranks sent since the last call."""
        store = _store()
        last = store.add(self._records, 0)
        while self._received < last and store.check([f"{self._records}/{self._received + 1}"]):
            self._received += 1
            key = f"{self._records}/{self._received}"
            self._send(json.loads(store.get(key)))
            store.delete_key(key)

    def _rule(self, key: str, step: int, sample: Sample, judge: Judge) -> list[Fired]:
        """Joins and writes the sample. Publishes the rules that fire, which the other ranks read."""
        rules: list[Fired] = []
        try:
            self._write_joined(key, step, sample)
            rules = judge(sample)
        finally:
            if self._sent_key and not self._silent:  # every rank has sent a later sample, so has read this
                _store().delete_key(self._sent_key)
            self._sent_key = f"{key}/rules"
            _store().set(self._sent_key, json.dumps(rules))
        return rules

    def _receive_rules(self, key: str, step: int) -> list[Fired]:
        """Returns the rules that fire on rank 0 in the joined sample. Raises `TimeoutError`."""
        store, key, end = _store(), f"{key}/rules", time.monotonic() + 2 * _WAIT_S
        while not store.check([key]):
            if time.monotonic() > end:
                raise TimeoutError(f"the first rank did not send the results of its rules for step {step}")
            time.sleep(_POLL_S)
        return [(index, row) for index, row in json.loads(store.get(key))]

    def _write_joined(self, key: str, step: int, sample: Sample) -> None:
        """Adds the samples of other ranks to `sample`, and writes it with the number of ranks in it.

        key: the start of the keys of these samples.
        """
        _, count = _rank_and_size()
        store, end, sent = _store(), time.monotonic() + _WAIT_S, 1
        self._silent = {rank for rank in self._silent if not store.check([f"{key}/{rank}"])}
        waiting = set(range(1, count)) - self._silent
        while waiting and time.monotonic() < end:
            arrived = [rank for rank in waiting if store.check([f"{key}/{rank}"])]
            for rank in arrived:
                packed = json.loads(store.get(f"{key}/{rank}"))
                join(sample, {tuple(cast): Tally.from_json(values) for cast, values in packed})
                store.delete_key(f"{key}/{rank}")
                sent += 1
            waiting -= set(arrived)
            if not arrived:
                time.sleep(_POLL_S)
        if waiting:
            self._silent |= waiting
            self._warn("samples lack some ranks", TimeoutError(f"ranks {sorted(waiting)} sent nothing"))
        self._write(step, sample, sent)


def _rank_and_size() -> tuple[int, int]:
    """Returns rank and world size of the default process group."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def _store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()
