"""The actions of rules that fire. All ranks act in the same step; rank 0 writes the records.

warn     logs a warning
bf16     runs the GEMM of the operand in BF16 from the next step on, after graphs of its layer are recompiled;
         the GEMM then stays in BF16, also in a restarted run that uses the policy file
dump     writes an excerpt of the GEMM's operands, on each rank that has them (see `dump`)
stop     raises `WatchError`, after the other rules of the step have acted
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mxcompile.errors import WatchError, printable
from mxcompile.policy import Gemm, Layer, Policy, keeping
from mxcompile.publish import publish
from mxcompile.report.files import rank
from mxcompile.watch.dump import Dumps, Excerpt
from mxcompile.watch.rules import Rule
from mxcompile.watch.tally import KEY_NAMES, STATS, Key, Sample, row

log = logging.getLogger(__name__)

Fired = tuple[int, dict[str, Any]]
"""Index of a rule, and the operand that it fired for, as a row of a sample."""

Below = frozenset[tuple[str, str]]
"""Pairs (path of a layer relative to a module, GEMM)."""


class Fallbacks:
    """The GEMMs that one watch moved to BF16.

    path: path of the policy file, None if no rule moves any. policy: the user's policy.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.policy = Policy()
        self._layers: dict[str, Layer] = {}
        self._why: dict[str, dict[Gemm, str]] = {}

    def register(self, policy: Policy, layers: Iterable[Layer]) -> None:
        """Stores the `layers` of a model and the user's `policy` that they are compiled with."""
        self.policy = policy
        for layer in layers:
            self._layers.setdefault(layer.name, layer)

    def add(self, layer: str, gemm: str, why: str) -> str:
        """Moves `gemm` of the layer named `layer` to BF16. Returns the effect as text.

        Raises `OSError` if the file cannot be written; the GEMM moves to BF16 nevertheless.
        """
        if layer not in self._layers:
            return f"{layer} is not a layer of the plan, and is not changed"
        gemms = self._why.setdefault(layer, {})
        if Gemm(gemm) in gemms:
            return f"{layer} {gemm} is set to BF16 already"
        gemms[Gemm(gemm)] = why
        torch._dynamo.config.recompile_limit += 1  # this recompile must not use up the user's limit
        if self.path is not None and not rank():
            reasons = (f"# {printable(reason)}\n" for kept in self._why.values() for reason in kept.values())
            head = f"# {printable(self.policy.label)}, with GEMMs that rules of a watch put into BF16:\n"
            publish(self.path, "".join((head, *reasons, self.over(self.policy).to_yaml())))
        return f"{layer} {gemm} is in BF16 from the next step"

    def over(self, policy: Policy) -> Policy:
        """Returns `policy` with rules that keep the GEMMs passed to `add` in BF16."""
        if not self._why:
            return policy
        kept = {self._layers[name]: why for name, why in self._why.items()}
        return keeping(policy, kept, f"{policy.label}, changed by a watch: {self.path}")

    def below(self, path: str) -> Below:
        """Returns the GEMMs in BF16 below the module at `path`; "" stands for the whole model."""
        start = f"{path}." if path else ""
        inside = {name: gemms for name, gemms in self._why.items() if name == path or name.startswith(start)}
        return frozenset((name.removeprefix(path), g.value) for name, gemms in inside.items() for g in gemms)


def fired(rules: Sequence[Rule], sample: Sample) -> list[Fired]:
    """Returns the rules that fire in `sample`. Call it once per sample: rules count consecutive samples."""
    every = frozenset(STATS)
    rows = [row(key, tally, every) for key, tally in sample.items()]
    return [(index, numbers) for numbers in rows for index, rule in enumerate(rules) if rule.fires(numbers)]


@dataclass(frozen=True, slots=True)
class Actions:
    """The actions of the rules of one watch.

    send: writes a record, called with its kind and fields. warn: logs a failure, called with a text and the
    error.
    """

    rules: Sequence[Rule]
    fallbacks: Fallbacks
    dumps: Dumps
    send: Callable[..., None]
    warn: Callable[[str, Exception], None]

    def act(self, step: int, fired: Sequence[Fired], excerpts: Mapping[Key, Excerpt]) -> None:
        """Runs the actions of the rules that `fired`. excerpts: excerpts of operands on this rank.

        Raises `WatchError` if a rule stops the run.
        """
        stops = ""
        for index, numbers in fired:
            rule = self.rules[index]
            message = rule.sentence(step, numbers)
            fields = self._done(rule.do, step, message, numbers, excerpts)
            if not rank():
                where = {name: numbers[name] for name in KEY_NAMES}
                self.send("rule", step=step, do=rule.do, message=message, **where, **fields)
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
                effect = self.fallbacks.add(layer, gemm, message)
            except OSError as error:
                self.warn(f"cannot write the policy to {self.fallbacks.path}", error)
                effect = f"{layer} {gemm} is in BF16 from the next step, in this run alone"
            return {"effect": effect, "policy": str(self.fallbacks.path)}
        if do == "dump":
            of_gemm = {key[2]: excerpt for key, excerpt in excerpts.items() if key[:2] == (layer, gemm)}
            try:
                return {"dump": self.dumps.write(step, layer, gemm, message, of_gemm)}
            except (OSError, RuntimeError) as error:
                self.warn(f"cannot write operands to {self.dumps.folder}", error)
                return {"dump": "no file"}
        return {}
