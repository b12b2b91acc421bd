"""`Watch`: what a user asks to see of a run, and where it goes."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from weakref import WeakValueDictionary

from torch import nn

from mxcompile.errors import NonFiniteError, OptionError, WatchError, not_allowed, shown
from mxcompile.policy import Match
from mxcompile.report.files import rank
from mxcompile.watch.ranks import Ranks
from mxcompile.watch.recorder import Count, Recorder, Sample
from mxcompile.watch.rules import Rule, rules_of
from mxcompile.watch.tally import STATS, row
from mxcompile.watch.tripwire import finding, sentence
from mxcompile.watch.writers import SCHEMA, JsonLines, Record, TensorBoard, Writer

log = logging.getLogger(__name__)

ACTIONS = ("warn", "stop")
"""What `Watch(nonfinite=…)` may be."""

Target = str | Path | Callable[[Record], object] | Any
"""Any: a ``SummaryWriter``, which is known by its `add_scalar`."""


class Watch:
    """Statistics of the operands of quantized products, of every so many steps of training.

    to: a path for JSON lines, a callable that takes each record, a ``SummaryWriter`` of TensorBoard, or
    several of these. every: steps from a sample to the next; None for no samples. start, stop: the first step
    that is sampled, and the first after them that is not.
    layers: globs or ``re:`` expressions of names of layers, all by default. stats: those of `STATS` that
    records have. first: the number of the first step; a run that goes on from a checkpoint has a later one.
    nonfinite: what a NaN or Inf in any step does, before an optimizer has stepped: "warn" or "stop", which
    raises `NonFiniteError`; None does not look. rules: see `mxcompile.watch.rules`.

    A step ends when an optimizer of the model begins to step. Without one, call `step`. Of many ranks the
    first writes, for all. Raises `OptionError`.
    """

    def __init__(
        self,
        to: Target | Sequence[Target] = (),
        *,
        every: int | None = 100,
        start: int = 0,
        stop: int | None = None,
        layers: str | Sequence[str] = (),
        stats: Sequence[str] = STATS,
        first: int = 0,
        nonfinite: str | None = None,
        rules: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.every = None if every is None else _number("every", every, least=1)
        if nonfinite is not None and nonfinite not in ACTIONS:
            raise OptionError(not_allowed("nonfinite", nonfinite, ACTIONS))
        self.nonfinite = nonfinite
        self._rules = rules_of(rules)
        self.start = _number("start", start)
        self.stop = None if stop is None else _number("stop", stop)
        self.layers = (layers,) if isinstance(layers, str) else tuple(layers)
        self.stats = frozenset(_stats(stats))
        self._match = Match(name=self.layers)
        self._writers = [_writer(each) for each in _listed(to)]
        tripped = self._trip if nonfinite else None
        self._recorder = Recorder(_number("first", first), self._is_sampled, self._finish, tripped)
        self._ranks = Ranks(self._write, self._recorder.warn)
        self._about: Record = {}
        self._is_begun = False
        self._recorder.steps.listen()

    def __repr__(self) -> str:
        return f"Watch({self._writers}, every={self.every})"

    @property
    def current_step(self) -> int:
        """The number of the step that is going on."""
        return self._recorder.steps.number

    def step(self) -> None:
        """End a step: for training loops without an optimizer of ``torch.optim``."""
        self._recorder.steps.end()

    def resume(self, step: int) -> None:
        """Give the next step the number `step`."""
        self._recorder.steps.move_to(_number("step", step))

    def close(self) -> None:
        """Write what is pending: the sample of a step whose optimizer did not step, what ranks have sent."""
        self._recorder.steps.end()
        self._ranks.close()

    def watches(self, layer: str) -> bool:
        """Whether the layer called `layer` is looked at."""
        return self._match.names(layer)

    def attach(self, model: nn.Module | None, **about: Any) -> Recorder:
        """Look at compiled code of `model`. about: said of the run in its first record."""
        self._recorder.steps.follow(model)
        self._about = self._about | about
        return self._recorder

    def _is_sampled(self, step: int) -> bool:
        if self.every is None or step < self.start or (self.stop is not None and step >= self.stop):
            return False
        return (step - self.start) % self.every == 0

    def check(self) -> None:
        """Look for NaN and Inf now: before ``GradScaler.step``, which may leave out the optimizer's step.

        Ends the sample of the step. Raises `NonFiniteError` if `nonfinite` is "stop".
        """
        self._recorder.steps.check()

    def _trip(self, step: int, counts: list[Count]) -> None:
        found = finding(counts)
        message = sentence(step, found)
        self._send(_record("nonfinite", step=step, rank=rank() or 0, **found))
        if self.nonfinite == "stop":
            raise NonFiniteError(message)
        log.warning("%s", message)

    def _finish(self, step: int, sample: Sample) -> None:
        fired = list(self._fired(sample)) if self._rules else []
        self._ranks.gather(step, sample)
        for rule, numbers in fired:
            message = rule.sentence(step, numbers)
            self._send(_record("rule", step=step, rank=rank() or 0, do=rule.do, message=message))
            if rule.do == "stop":
                raise WatchError(message)
            log.warning("%s", message)

    def _fired(self, sample: Sample) -> Iterator[tuple[Rule, dict[str, Any]]]:
        """The rules that fire in the sample of this rank, with the operand that they fire for."""
        for key, tally in sample.items():
            numbers = row(key, tally, frozenset(STATS))
            yield from ((rule, numbers) for rule in self._rules if rule.fires(numbers))

    def _write(self, step: int, sample: Sample, ranks: int) -> None:
        """Write the sample of `step`, that of all ranks. ranks: how many of them it has."""
        if not self._is_begun:
            self._is_begun = True
            self._send(_record("run", **self._about, left_out=_left_out(self._recorder)))
        rows = [row(key, tally, self.stats) for key, tally in sample.items()]
        self._send(_record("sample", step=step, ranks=ranks, rows=rows))

    def _send(self, record: Record) -> None:
        for writer in self._writers:
            try:
                writer(record)
            except Exception as error:
                self._recorder.warn(f"{writer!r} took no {record['kind']} record", error)


def _record(kind: str, **values: Any) -> Record:
    return {"schema": SCHEMA, "kind": kind, "time": time.time(), **values}


def _left_out(recorder: Recorder) -> list[dict[str, str]]:
    """The operands that are not measured, and why."""
    names = "layer", "gemm", "operand"
    return [{**dict(zip(names, key, strict=True)), "why": why} for key, why in recorder.left_out.items()]


def _listed(to: Any) -> Iterable[Any]:
    single = isinstance(to, str | Path) or callable(to) or hasattr(to, "add_scalar")
    return [to] if single else to


def _writer(target: Any) -> Writer:
    if isinstance(target, str | Path) and str(target):
        return JsonLines(Path(target).absolute())
    if hasattr(target, "add_scalar"):
        return TensorBoard(target)
    if callable(target):
        return cast(Writer, target)
    raise OptionError(f"watch: expected a path, a callable or a SummaryWriter, found {shown(target)}")


def _number(name: str, value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"watch: {name} is an integer from {least} on, found {shown(value)}")
    return value


def _stats(stats: Sequence[str]) -> Iterable[str]:
    for word in [stats] if isinstance(stats, str) else stats:
        if word not in STATS:
            raise OptionError(not_allowed("statistic", word, STATS))
        yield word


@functools.cache
def _nonfinite() -> Watch:
    """The watch that is asked for by that word."""
    return Watch(every=None, nonfinite="warn")


_BY_PATH: WeakValueDictionary[Path, Watch] = WeakValueDictionary()
"""Those that were asked for by a path: each graph of a model asks anew."""


def resolve(value: Any) -> Watch | None:
    """The watch of the option `value`: a `Watch`, a path, "nonfinite", or None. Raises `OptionError`."""
    if value is None or isinstance(value, Watch):
        return value
    if value == "nonfinite":
        return _nonfinite()
    if not isinstance(value, str | Path) or not str(value):
        raise OptionError(f"option 'watch' is a file path, 'nonfinite' or a Watch, found {shown(value)}")
    path = Path(value).absolute()
    watch = _BY_PATH.get(path)
    if watch is None:
        watch = _BY_PATH[path] = Watch(path)
    return watch
