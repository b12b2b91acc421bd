"""`Watch`: the user's selection of statistics of a run, and their destinations."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn

from mxcompile.errors import NonFiniteError, OptionError, check_word, shown
from mxcompile.passes.watch import OPERANDS, Reader
from mxcompile.policy import Layer, Match, Policy
from mxcompile.policy.schema import MATCH
from mxcompile.report.files import rank
from mxcompile.watch.actions import Actions, Fallbacks, fired
from mxcompile.watch.dump import Dumps
from mxcompile.watch.ranks import Ranks
from mxcompile.watch.recorder import Count, Recorder, finding, sentence
from mxcompile.watch.rules import Rule, words_of
from mxcompile.watch.tally import KEY_NAMES, STATS, Sample, row
from mxcompile.watch.writers import SCHEMA, JsonLines, Record, TensorBoard, Writer

log = logging.getLogger(__name__)

ACTIONS = ("warn", "stop")
"""Values of `Watch(nonfinite=…)`."""

Target = str | Path | Callable[[Record], object] | Any
"""Destination of records. `Any` stands for a ``SummaryWriter``, recognised by its `add_scalar`."""


class Watch:
    """Records statistics of the operands of quantized GEMMs in every n-th step of training.

    A step ends when an optimizer of the model begins to step. Without an optimizer, call `step`. With several
    ranks, rank 0 writes the statistics of all; each rank makes its watches in the same order.

    Args:
        to: destination, or several: a path for JSON lines, a callable that takes each record, or a
            TensorBoard ``SummaryWriter``.
        every: number of steps from a sample to the next; None for no samples.
        start: first sampled step.
        stop: first step that is no longer sampled; None for no end.
        layers: globs or ``re:`` expressions of layer names; all layers by default.
        operands: measured operands, of "x", "w" and "dy" (the default), and the results "y" and "dw", which
            are not cast.
        stats: statistics in the records, all by default.
        first: number of the first step, for a run that continues from a checkpoint.
        nonfinite: action on a NaN or Inf in any step, before the optimizer steps: "warn", "stop" (raises
            `NonFiniteError`), or None for no check.
        rules: rules as in `mxcompile.watch.rules`.
        policy: file with the GEMMs that rules moved to BF16; by default ``run.policy.yaml`` for
            ``run.jsonl``.
        dump: folder for operands that rules write; by default ``run.dump``.

    Raises:
        OptionError: for invalid arguments.
    """

    _numbers = itertools.count()
    """Numbers of watches, equal on ranks that make their watches in the same order."""

    def __init__(
        self,
        to: Target | Sequence[Target] = (),
        *,
        every: int | None = 100,
        start: int = 0,
        stop: int | None = None,
        layers: str | Sequence[str] = (),
        operands: Sequence[str] = OPERANDS[:3],
        stats: Sequence[str] = STATS,
        first: int = 0,
        nonfinite: str | None = None,
        rules: Sequence[Mapping[str, Any]] = (),
        policy: str | Path | None = None,
        dump: str | Path | None = None,
    ) -> None:
        self.every = None if every is None else _number("every", every, least=1)
        if nonfinite is not None:
            check_word("nonfinite", nonfinite, ACTIONS)
        self.nonfinite = nonfinite
        self._rules = tuple(map(Rule.from_mapping, rules))
        self.can_change = any(rule.do == "bf16" for rule in self._rules)
        self.start = _number("start", start)
        self.stop = None if stop is None else _number("stop", stop)
        self.layers = words_of("layers", MATCH["name"], layers) if layers else ()
        self.operands = frozenset(_words("operand", operands, OPERANDS))
        for operand in (operand for rule in self._rules for operand in rule.operands):
            if operand not in self.operands:
                raise OptionError(
                    f"watch rule: operand {operand!r} is not measured: name it in Watch(operands=…)"
                )
        self.stats = frozenset(_words("statistic", stats, STATS))
        self._match = Match(name=self.layers)
        single = isinstance(to, str | Path) or callable(to) or hasattr(to, "add_scalar")
        targets: Any = [to] if single else to
        self._writers = [_writer(target) for target in targets]
        tripped = self._trip if nonfinite else None
        self._recorder = Recorder(_number("first", first), self._is_sampled, self._finish, tripped)
        judge = functools.partial(fired, self._rules) if self._rules else None
        name = f"{type(self).__name__}/{next(self._numbers)}"
        self._ranks = Ranks(name, self._write, self._recorder.warn, self._pass_on, judge)
        self.fallbacks = Fallbacks(self._path_of("bf16", "policy", policy, ".policy.yaml"))
        dumps = Dumps(self._path_of("dump", "dump", dump, ".dump"))
        self._actions = Actions(self._rules, self.fallbacks, dumps, self._send, self._recorder.warn)
        self._losses: dict[int, list[float]] = {}
        self._about: Record = {}
        self._names: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
        self._has_shared = False
        self._is_begun = False
        self._phases: set[tuple[bool, ...]] = set()
        self._recorder.steps.listen()

    def __deepcopy__(self, memo: object) -> Watch:
        """Returns itself, because Lightning and Accelerate copy the arguments of torch.compile."""
        return self

    def __repr__(self) -> str:
        return f"Watch({self._writers}, every={self.every})"

    @property
    def current_step(self) -> int:
        """Number of the current step."""
        return self._recorder.steps.number

    @property
    def next_step(self) -> int:
        """Number of the step of a forward that begins now."""
        return self._recorder.steps.next

    def step(self) -> None:
        """Ends a step. Call it in training loops without an optimizer of ``torch.optim``."""
        self._recorder.steps.end()

    def loss(self, value: float | Tensor) -> None:
        """Records the loss of the current step in its sample. Call it before the optimizer steps.

        Args:
            value: a number, or a tensor with one element, which is read only in sampled steps. Several calls
                in a step (micro-batches) are averaged. With several ranks, rank 0's loss is recorded.
        """
        if self._is_sampled(self.current_step) and not rank():
            number = float(value.detach() if isinstance(value, Tensor) else value)
            self._losses.setdefault(self.current_step, []).append(number)

    def resume(self, step: int) -> None:
        """Sets the number of the next step to `step`."""
        self._recorder.steps.move_to(_number("step", step))

    def close(self) -> None:
        """Writes pending data: the sample of a step without an optimizer step, and samples of other ranks."""
        self._recorder.steps.end()
        self._ranks.close()

    def watches(self, layer: str) -> bool:
        """Whether the layer named `layer` is measured."""
        return self._match.names(layer)

    @property
    def identity(self) -> str:
        """A string that is equal for watches with equal measurements in a graph, a part of cache keys."""
        dumps = [(rule.match, rule.gemms) for rule in self._rules if rule.do == "dump"]
        return f"{self.layers} {sorted(self.operands)} {dumps}"

    def dumps(self, reader: Reader) -> bool:
        """Whether a rule may write the operand that `reader` describes to a file."""
        return any(
            rule.do == "dump" and rule.covers(reader.layer, reader.role, reader.gemm) for rule in self._rules
        )

    def enter(self, policy: Policy) -> tuple[bool, ...]:
        """Returns which rules of `policy` apply in the next step; a new set raises the recompile limit."""
        in_force = policy.in_force(self.next_step)
        if self._phases and in_force not in self._phases:
            torch._dynamo.config.recompile_limit += 1  # this recompile must not use up the user's limit
        self._phases.add(in_force)
        return in_force

    def _compare_names(self, model: nn.Module, names: set[str]) -> None:
        """Warns once if another model has layers of the same `names`, whose rows have nothing else."""
        shared = {
            name for other, theirs in self._names.items() if other is not model for name in theirs & names
        }
        if shared and not self._has_shared:
            self._has_shared = True
            log.warning(
                "models of one watch have layers of the same name, and rows of a layer mix them: %s; give"
                " each model a watch of its own",
                min(shared),
            )
        self._names.setdefault(model, set()).update(names)

    def attach(
        self, model: nn.Module | None, policy: Policy, layers: Iterable[Layer], **about: Any
    ) -> Recorder:
        """Watches compiled code of `model`, whose `layers` follow `policy`. Returns the recorder.

        about: fields of the first record of the run.
        """
        self._recorder.steps.follow(model)
        layers = [*layers]
        if model is not None:
            self._compare_names(model, {layer.name for layer in layers})
        if self.nonfinite:
            self._ranks.start()
        self.fallbacks.register(policy, layers)
        self._about = self._about | about | {"policy": policy.label}
        return self._recorder

    def _path_of(self, action: str, option: str, choice: str | Path | None, suffix: str) -> Path | None:
        """Returns the output path of rules with `action`; None without rules. Raises `OptionError`."""
        if not any(rule.do == action for rule in self._rules):
            return None
        files = (writer.path.with_suffix(suffix) for writer in self._writers if isinstance(writer, JsonLines))
        path = next(files, None) if choice is None else Path(choice).absolute()
        if path is None:
            raise OptionError(
                f"a watch rule with do: {action} writes a file: name it, as in Watch({option}='run{suffix}')"
            )
        return path

    def _is_sampled(self, step: int) -> bool:
        if self.every is None or step < self.start or (self.stop is not None and step >= self.stop):
            return False
        return (step - self.start) % self.every == 0

    def check(self) -> None:
        """Checks for NaN and Inf now and ends the sample of the step.

        Call it before ``GradScaler.step``, which may skip the optimizer's step.

        Raises:
            NonFiniteError: if `nonfinite` is "stop" and a value is not finite.
        """
        self._recorder.steps.check()

    def _trip(self, step: int, counts: list[Count]) -> None:
        facts = finding(counts)
        message = sentence(step, facts)
        self._ranks.send_to_first(_record("nonfinite", step=step, rank=rank() or 0, **facts))
        if self.nonfinite == "stop":
            raise NonFiniteError(message)
        log.warning("%s", message)

    def _finish(self, step: int, sample: Sample) -> None:
        excerpts, self._recorder.excerpts = self._recorder.excerpts, {}
        self._actions.act(step, self._ranks.gather(step, sample), excerpts)

    def _write(self, step: int, sample: Sample, ranks: int) -> None:
        """Writes the joined `sample` of `step`. ranks: number of ranks in it."""
        rows = [row(key, tally, self.stats) for key, tally in sample.items()]
        if not self._is_begun:
            missing = [*self._recorder.left_out.items()]  # graphs of other threads may add some
            left_out = [{**dict(zip(KEY_NAMES, key, strict=True)), "why": why} for key, why in missing]
            self._send("run", **self._about, left_out=left_out)
            for index, rule in enumerate(self._rules):
                if not any(map(rule.looks_at, rows)):
                    log.warning("watch: rule %d matches no operand that step %d measures", index + 1, step)
            self._is_begun = True
        losses = self._losses.pop(step, [])
        mean = sum(losses) / len(losses) if losses else math.nan
        noted: Record = {"loss": mean if math.isfinite(mean) else None} if losses else {}
        if self.fallbacks.policy.has_steps:
            noted["phase"] = self.fallbacks.policy.at(step).phase
        self._send("sample", step=step, ranks=ranks, **noted, rows=rows)

    def _send(self, kind: str, **values: Any) -> None:
        self._pass_on(_record(kind, **values))

    def _pass_on(self, record: Record) -> None:
        for writer in self._writers:
            try:
                writer(record)
            except Exception as error:
                self._recorder.warn(f"{writer!r} took no {record['kind']} record", error)


def _record(kind: str, **values: Any) -> Record:
    return {"schema": SCHEMA, "kind": kind, "time": time.time(), **values}


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
        raise OptionError(f"watch: {name} must be an integer of at least {least}, found {shown(value)}")
    return value


def _words(noun: str, words: Sequence[str], allowed: Sequence[str]) -> Iterable[str]:
    for word in [words] if isinstance(words, str) else words:
        check_word(noun, word, allowed)
        yield word


class _OptionWatch(Watch):
    """The watch of an option. It has a number of its own, because a rank that compiles nothing has none."""

    _numbers = itertools.count()


@functools.cache
def _nonfinite() -> Watch:
    """Returns the watch for the option "nonfinite"."""
    return _OptionWatch(every=None, nonfinite="warn")


_BY_PATH: WeakValueDictionary[Path, Watch] = WeakValueDictionary()
"""Watches by path. Each graph of a model resolves the option, and all graphs must share one watch."""


def resolve(value: Any) -> Watch | None:
    """Returns the watch of the option `value`: a `Watch`, path, "nonfinite" or None. Raises `OptionError`."""
    if value is None or isinstance(value, Watch):
        return value
    if value == "nonfinite":
        return _nonfinite()
    if not isinstance(value, str | Path) or not str(value):
        raise OptionError(f"option 'watch' must be a file path, 'nonfinite' or a Watch, found {shown(value)}")
    path = Path(value).absolute()
    watch = _BY_PATH.get(path)
    if watch is None:
        watch = _BY_PATH[path] = _OptionWatch(path)
    return watch
