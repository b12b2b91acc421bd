"""Samples of many ranks joined into one: by the key-value store of the process group, without a collective.

    rank r: store[step, r] = its tallies          the first rank: waits for them in a thread, joins, writes

No rank waits for another in a step. A rank that does not send in time, as one without watched layers, is not
waited for again. The record says how many ranks sent.
"""

from __future__ import annotations

import atexit
import json
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from mxcompile.watch.recorder import Sample
from mxcompile.watch.tally import Tally, join

_PREFIX = "mxcompile_watch"
_WAIT_S = 60.0
_POLL_S = 0.02

Written = Callable[[int, Sample, int], None]
Warn = Callable[[str, Exception], None]


class Ranks:
    """The ranks of one watch. write: takes step, sample and number of ranks, on the first rank."""

    def __init__(self, write: Written, warn: Warn) -> None:
        self._write = write
        self._warn = warn
        self._queue: queue.Queue[tuple[int, Sample] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._silent: set[int] = set()

    def gather(self, step: int, sample: Sample) -> None:
        """Join `sample` of this rank with those of the others, and write it if this is the first rank."""
        rank, count = _place()
        if count == 1:
            self._write(step, sample, 1)
            return
        try:
            if rank:
                _store().set(_key(step, rank), _packed(sample))
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="mxcompile-watch", daemon=True)
                self._thread.start()
                atexit.register(self.close)
            self._queue.put((step, sample))
        except Exception as error:
            self._warn("a sample did not reach the first rank", error)

    def close(self) -> None:
        """Wait until all that this rank has gathered is written."""
        thread, self._thread = self._thread, None
        if thread is not None:
            atexit.unregister(self.close)
            self._queue.put(None)
            thread.join(timeout=2 * _WAIT_S)

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            step, sample = item
            try:
                sent = self._join(step, sample)
                self._write(step, sample, sent)
            except Exception as error:
                self._warn(f"the sample of step {step} was lost", error)

    def _join(self, step: int, sample: Sample) -> int:
        """Add to `sample` what other ranks send. Returns how many ranks it is of."""
        _, count = _place()
        store, end, sent = _store(), time.monotonic() + _WAIT_S, 1
        waiting = set(range(1, count)) - self._silent
        while waiting and time.monotonic() < end:
            arrived = [rank for rank in waiting if store.check([_key(step, rank)])]
            for rank in arrived:
                join(sample, _unpacked(store.get(_key(step, rank))))
                store.delete_key(_key(step, rank))
                sent += 1
            waiting -= set(arrived)
            if not arrived:
                time.sleep(_POLL_S)
        if waiting:
            self._silent |= waiting
            self._warn("samples go on without them", TimeoutError(f"ranks {sorted(waiting)} sent nothing"))
        return sent


def _place() -> tuple[int, int]:
    """Rank and number of ranks of the default process group."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def _store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def _key(step: int, rank: int) -> str:
    return f"{_PREFIX}/{step}/{rank}"


def _packed(sample: Sample) -> str:
    return json.dumps([[key, tally.packed()] for key, tally in sample.items()])


def _unpacked(data: bytes) -> Sample:
    return {tuple(key): Tally.unpacked(packed) for key, packed in json.loads(data)}
