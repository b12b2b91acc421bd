"""The actions of rules that fire. All ranks act in the same step; rank 0 writes the records.

warn     logs a warning
bf16     runs the GEMM of the operand in BF16 from the next step on (see `fallback`)
dump     writes an excerpt of the GEMM's operands, on each rank that has them (see `dump`)
stop     raises `WatchError`, after the other rules of the step have acted
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mxcompile.errors import WatchError
from mxcompile.report.files import rank
from mxcompile.watch.dump import Dumps, Excerpt
from mxcompile.watch.fallback import Fallbacks
from mxcompile.watch.rules import Rule
from mxcompile.watch.tally import STATS, Key, Sample, row

log = logging.getLogger(__name__)

Fired = tuple[int, dict[str, Any]]
"""Index of a rule, and the operand that it fired for, as a row of a sample."""


def fired(rules: Sequence[Rule], sample: Sample) -> list[Fired]:
    """Returns the rules that fire in `sample`. Call it once per sample: rules count consecutive samples."""
    every = frozenset(STATS)
    rows = [row(key, tally, every) for key, tally in sample.items()]
    return [(index, numbers) for numbers in rows for index, rule in enumerate(rules) if rule.fires(numbers)]


class Actions:
    """The actions of the rules of one watch.

    send: writes a record, called with its kind and fields. warn: logs a failure, called with a text and the
    error.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        fallbacks: Fallbacks,
        dumps: Dumps,
        send: Callable[..., None],
        warn: Callable[[str, Exception], None],
    ) -> None:
        self._rules = rules
        self._fallbacks = fallbacks
        self._dumps = dumps
        self._send = send
        self._warn = warn

    def act(self, step: int, fired: Sequence[Fired], excerpts: Mapping[Key, Excerpt]) -> None:
        """Runs the actions of the rules that `fired`. excerpts: excerpts of operands on this rank.

        Raises `WatchError` if a rule stops the run.
        """
        stops = ""
        for index, numbers in fired:
            rule = self._rules[index]
            message = rule.sentence(step, numbers)
            fields = self._done(rule.do, step, message, numbers, excerpts)
            if not rank():
                where = {name: numbers[name] for name in ("layer", "gemm", "operand")}
                self._send("rule", step=step, do=rule.do, message=message, **where, **fields)
                if rule.do != "stop":
                    log.warning("%s", "; ".join([message, *fields.values()]))
            if rule.do == "stop":
                stops = stops or message
        if stops:
            raise WatchError(stops)

    def _done(
        self, do: str, step: int, message: str, numbers: dict[str, Any], excerpts: Mapping[Key, Excerpt]
    ) -> dict[str, str]:
        """Runs one action. Returns the fields for its record."""
        layer, gemm = numbers["layer"], numbers["gemm"]
        if do == "bf16":
            try:
                effect = self._fallbacks.add(layer, gemm, message)
            except OSError as error:
                self._warn(f"cannot write the policy to {self._fallbacks.path}", error)
                effect = f"{layer} {gemm} is in BF16 from the next step, in this run alone"
            return {"effect": effect, "policy": str(self._fallbacks.path)}
        if do == "dump":
            of_gemm = {key[2]: excerpt for key, excerpt in excerpts.items() if key[:2] == (layer, gemm)}
            try:
                return {"dump": self._dumps.write(step, layer, gemm, message, of_gemm)}
            except (OSError, RuntimeError) as error:
                self._warn(f"cannot write operands to {self._dumps.folder}", error)
                return {"dump": "no file"}
        return {}
