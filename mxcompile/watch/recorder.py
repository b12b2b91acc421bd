"""Collects statistics while a model trains, in sampled steps, and passes on the sample of each step.

    forward, backward of a sampled step  →  deliveries  →  tallies  →  record, before the optimizer steps

Statistics stay on the device until the step is over. Only a rule or NaN check ends a run: any other failure
is a warning, logged once per reason.

    casts in the order of execution:   finite … finite  FIRST  later operands

A check for NaN or Inf names the first operand that has them, and their origin. Later operands inherit the
values from the first. The values in x and dy arise between the last GEMM with finite operands and the cast
of the first operand; in a weight from an update or the loaded model; in a result from its GEMM.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mxcompile.errors import WatchError
from mxcompile.ops.watch import FIELDS, listen
from mxcompile.passes.watch import RESULTS
from mxcompile.watch.dump import Excerpt
from mxcompile.watch.steps import Call, Steps, current, in_backward
from mxcompile.watch.tally import KEY_NAMES, Key, Sample, Tally

log = logging.getLogger(__name__)

_NAN, _INF = FIELDS.index("nan"), FIELDS.index("inf")

Count = tuple[Key, int]
"""A cast, and its number of NaN and Inf in the scales, or in the elements if scales do not show them."""

Delivery = tuple[Call, list[dict[str, Any]], Tensor, list[Tensor], list[Excerpt | None]]
"""Results of one run of a graph: call, casts, statistics, parts of the casts of weights, excerpts."""


class Recorder:
    """The recorder of one watch.

    is_sampled: decides whether a step is sampled. finished: called with the number and the sample of a
    sampled step. left_out: operands that are not measured, and why. excerpts: excerpts of the last step, for
    `finished`. tripped: called with the number of a step with NaN or Inf and the counts of each cast, in the
    order of execution; None without NaN check.
    """

    def __init__(
        self,
        first: int,
        is_sampled: Callable[[int], bool],
        finished: Callable[[int, Sample], None],
        tripped: Callable[[int, list[Count]], None] | None,
    ) -> None:
        self.steps = Steps(first, self._end)
        self.left_out: dict[Key, str] = {}
        self.excerpts: dict[Key, Excerpt] = {}
        self._is_sampled = is_sampled
        self._finished = finished
        self._tripped = tripped
        self._pending: list[Delivery] = []
        self._counted: set[tuple[str, int]] = set()
        self._previous: dict[Key, Tensor] = {}
        self._warned: set[str] = set()
        self._ended = -1
        self._lock = threading.Lock()

    def begin(self, compiled: str, running: Callable[[], str], code: int) -> Call | None:
        """Returns the call of a forward that will have a backward; None if nothing is measured in its step.

        compiled: path of the module that the code was compiled for. running: returns the path of the module
        that runs it. code: identifies the graph.
        """
        repeated = in_backward()
        step = self.steps.number if repeated and self.steps.is_open else self.steps.begin()
        is_sampled = self._is_sampled(step)
        if not is_sampled and self._tripped is None:
            return None
        path = running()
        key = path, code
        is_repeated = repeated and key in self._counted
        if not repeated:
            self._counted.add(key)
        return Call(
            recorder=self,
            step=step,
            compiled=compiled,
            running=path,
            is_sampled=is_sampled,
            is_repeated=is_repeated,
        )

    def take(self, call: Call, values: Sequence[Tensor], words: Sequence[str]) -> None:
        """Stores the statistics of one run of a graph. words: a JSON object per cast. values: its tensors."""
        sites, remaining = [json.loads(word) for word in words], iter(values)
        measured: list[Tensor] = []
        kept: list[Tensor] = []
        excerpts: list[Excerpt | None] = []
        for site in sites:
            first = next(remaining, None)
            if first is None:
                for reader in site["readers"]:
                    self.left_out.setdefault(_key(call, reader), site["missing"])
                continue
            measured.append(first)
            if call.is_sampled:
                kept.append(next(remaining).clone())
                excerpts.append((next(remaining), next(remaining), site) if site["sizes"] else None)
        if measured:
            delivery = call, sites[: len(measured)], torch.stack(measured), kept, excerpts
            with self._lock:
                self._pending.append(delivery)

    def warn(self, event: str, error: Exception) -> None:
        """Logs `error` as a warning, once per kind."""
        reason = f"watch: {event}: {type(error).__name__}: {error}"
        if reason not in self._warned:
            self._warned.add(reason)
            log.warning("%s; training goes on", reason)

    def _end(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, []
        self._counted.clear()
        step, counts = self.steps.number, []
        if not pending and step == self._ended:
            return
        self._ended = step
        try:
            if self._tripped is not None:
                counts = _counts(pending)
            if self._is_sampled(step):
                self._finished(step, self._joined(pending))
        except WatchError:
            raise
        except Exception as error:
            self.warn("a sample was lost", error)
        if self._tripped is not None and any(count for _, count in counts):
            self._tripped(step, counts)

    def _joined(self, pending: Iterable[Delivery]) -> Sample:
        sample: Sample = {}
        self.excerpts = {}
        for call, sites, measured, kept, excerpts in pending:
            for site, numbers, part, excerpt in zip(sites, measured.tolist(), kept, excerpts, strict=True):
                for reader in site["readers"]:
                    key = _key(call, reader)
                    tally = Tally.from_numbers(reader["role"], site["format"], numbers)
                    if excerpt is not None and _is_worse(tally, sample.get(key)):
                        self.excerpts[key] = excerpt
                    if key not in sample:
                        self._compare(key, tally, part)
                        sample[key] = tally
                    elif reader["operand"] == "w":
                        sample[key].calls += 1
                    else:
                        sample[key].add(tally)
        return sample

    def _compare(self, key: Key, tally: Tally, part: Tensor) -> None:
        """Counts the elements of `part`, a part of a weight's cast, that differ from the previous sample."""
        before = self._previous.get(key)
        if part.numel():
            self._previous[key] = part
        if before is not None and before.shape == part.shape:
            tally.compared = part.numel()
            differs = (part != before) & ~(part.isnan() & before.isnan())
            tally.changed = int(differs.sum())


def _is_worse(tally: Tally, before: Tally | None) -> bool:
    """Whether the call of `tally` has NaN or Inf or larger values, and the calls before it do not."""
    if before is None:
        return True
    now, then = tally.sums, before.sums
    return now["nan"] + now["inf"] > 0 == then["nan"] + then["inf"] or now["amax"] > then["amax"]


def _counts(pending: Iterable[Delivery]) -> list[Count]:
    """Returns the counts of NaN and Inf of all casts of a step, in the order of execution."""
    counts: list[Count] = []
    for call, sites, measured, *_ in pending:
        bad = measured[:, _NAN : _INF + 1].sum(1) if call.is_sampled else measured[:, 0]
        for site, count in zip(sites, bad.tolist(), strict=True):
            counts += [(_key(call, reader), int(count)) for reader in site["readers"]]
    return counts


def _key(call: Call, reader: dict[str, str]) -> Key:
    return call.named(reader["layer"]), reader["gemm"], reader["operand"]


def _on_values(values: Sequence[Tensor], words: Sequence[str]) -> None:
    call, has_been_counted = current()
    if call is None or has_been_counted:
        return
    try:
        call.recorder.take(call, values, words)
    except Exception as error:
        call.recorder.warn("statistics were lost", error)


listen(_on_values)


def finding(counts: Sequence[Count]) -> dict[str, Any]:
    """Returns the first nonzero entry of `counts`: layer, gemm, operand, count, origin, later operands."""
    index = next(position for position, (_, count) in enumerate(counts) if count)
    first, count = counts[index]
    later = {key for key, more in counts[index + 1 :] if more and key[0] != first[0]}
    named: dict[str, Any] = dict(zip(KEY_NAMES, first, strict=True))
    return named | {"count": count, "origin": _origin(counts, index), "arrived": len(later)}


def _origin(counts: Sequence[Count], index: int) -> str:
    (layer, _, operand), _ = counts[index]
    if operand == "w":
        return "first in the weight: from an update, or from the loaded checkpoint"
    if operand in RESULTS.values():
        return "first in the product, whose operands are finite"
    before = [key for key, _ in counts[:index] if key[2] == operand and key[0] != layer]
    if not before:
        return "first in the model's input" if operand == "x" else "first in the loss or after the last layer"
    return f"first after {before[-1][0]} {before[-1][1]}, whose operands are finite"


def sentence(step: int, finding: dict[str, Any]) -> str:
    """Returns `finding` as a sentence."""
    return (
        f"step {step}: NaN or Inf in {finding['operand']} of {finding['layer']} {finding['gemm']}"
        f" ({finding['count']:,} scales or elements), {finding['origin']};"
        f" {finding['arrived']:,} later operands have NaN or Inf too"
    )
