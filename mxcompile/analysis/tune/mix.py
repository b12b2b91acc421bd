"""`mix`: for every layer the cheapest of several precisions that meets a bound, found by measuring.

    cost     of a layer's GEMMs and casts by the roofline of a target, then the bytes of their operands
    SQNR     the model runs once under each precision; a GEMM that is below the bound there stays in BF16
             under that precision
    loss     every layer is run alone in what it has; the one that moves the loss most for what its next best
             choice would cost more gets that, until the loss of all together is within the bound; then layers
             get the cheaper choice back where the bound allows it

BF16 is a choice of every layer. The policy found is audited; what fails there, together, is out as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from tqdm import tqdm

from mxcompile.analysis.audit import Audit, Run, Session, audit, loss_gap
from mxcompile.analysis.audit.interpreter import Key
from mxcompile.analysis.audit.session import LossFunction
from mxcompile.analysis.audit.text import decibels
from mxcompile.analysis.tune.bounds import Bounds
from mxcompile.analysis.tune.candidates import (
    BF16,
    Candidate,
    Cost,
    Costs,
    Mix,
    Option,
    mixed,
    quantized_layers,
)
from mxcompile.analysis.tune.measure import lowest_sqnr, quantizes
from mxcompile.analysis.tune.tuned import Chosen, Tuned
from mxcompile.policy import Gemm, Policy
from mxcompile.report import Report
from mxcompile.report.fold import spelled
from mxcompile.report.numerics import lowest


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of a model: what `Session` takes."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss_fn: LossFunction | None

    def session(self, policy: Policy) -> Session:
        """The call under `policy`."""
        return Session(self.model, self.args, self.kwargs, policy=policy, loss_fn=self.loss_fn)

    def audit(self, policy: Policy) -> Audit:
        """The call under `policy`, audited."""
        return audit(self.model, *self.args, policy=policy, loss_fn=self.loss_fn, kwargs=self.kwargs)


def mix(call: Call, start: Policy, among: Sequence[str], bounds: Bounds, target: str) -> Tuned:
    """The policy that gives each layer that `start` quantizes the cheapest of `among` within `bounds`.

    among: words of precisions and presets. target: costs are estimated for. Raises `OptionError` for a word
    that is neither, `ModelError` as `tune`.
    """
    candidates = [Candidate.of(word, start.base.formats) for word in dict.fromkeys(among)]
    with tqdm(desc="tune: tracing", unit="run", disable=None, leave=False) as bar:
        search = _Search(call, start, candidates, bounds, target, bar)
        while True:
            found = search.run()
            bar.set_description("tune: audit of the policy")
            policy = mixed(start, search.layers, candidates, found)
            final = call.audit(policy)
            bar.update()
            if not search.fails(found, final):
                break
    chosen = tuple(search.chosen(found, final))
    return Tuned(
        policy=policy,
        bounds=bounds,
        chosen=chosen,
        comments=tuple(_comments(found, chosen)),
        audit=final,
        flop_share_before=search.flop_share_before,
        met=bounds.allow(final.numerics) and (quantizes(final.report, bounds) or search.is_dearer(found)),
        target=target if search.costs.estimated else "",
    )


class _Search:
    """State of one search: what is no choice, and why.

    layers: those considered. costs: of their options. flop_share_before: quantized at the start.
    """

    def __init__(
        self,
        call: Call,
        start: Policy,
        candidates: Sequence[Candidate],
        bounds: Bounds,
        target: str,
        bar: tqdm[Any],
    ) -> None:
        self._call = call
        self._start = start
        self._candidates = candidates
        self._bounds = bounds
        self._bar = bar
        session = call.session(start)
        self._reference = session.run(Run(quantized=lambda _: False)).loss
        bar.update()
        bounds.check_loss(self._reference)
        self.flop_share_before = session.report().summary.flop_share
        self.layers = quantized_layers(session.report())
        self._failed: dict[tuple[str, Option], str] = {}
        self._moves: dict[tuple[str, Option], float] = {}
        self._kept: list[dict[str, list[str]]] = [{} for _ in candidates]
        self._said: list[dict[str, list[str]]] = [{} for _ in candidates]
        self._sqnr = [self._measure(index) for index in range(len(candidates))]
        self.costs = Costs([report for _, report in self._sqnr], target)
        for index, (sqnr, _) in enumerate(self._sqnr):
            self._exclude(index, sqnr)

    def _measure(self, index: int) -> tuple[dict[Key, float], Report]:
        """SQNR by GEMM with all layers in the candidate `index`, and the report."""
        self._bar.set_description(f"tune: everything in {self._candidates[index].word}")
        everywhere = {name: Option(candidate=index, kept=()) for name in self.layers}
        session = self._call.session(mixed(self._start, self.layers, self._candidates, everywhere))
        bounded = self._bounds.min_sqnr is not None
        found = lowest_sqnr(session, lambda _: True) if bounded else {}
        if not bounded:
            session.run(Run(quantized=lambda _: False))
        self._bar.update()
        return found, session.report()

    def _exclude(self, index: int, sqnr: Mapping[Key, float]) -> bool:
        """Keep the GEMMs in BF16 under the candidate `index` that are below the bound; whether there are."""
        failing = {key: value for key, value in sqnr.items() if not self._bounds.allows_sqnr(value)}
        # what follows a NaN is NaN: only the first of them is known to be the cause
        finite = {key: value for key, value in failing.items() if not math.isnan(value)}
        for (layer, gemm), value in (finite or dict(itertools.islice(failing.items(), 1))).items():
            self._kept[index].setdefault(layer, []).append(gemm)
            said = f"{self._candidates[index].word}: {gemm} {decibels(value)} dB"
            self._said[index].setdefault(layer, []).append(said)
        return bool(failing)

    def fails(self, found: Mix, final: Audit) -> bool:
        """Whether the audit of `found` is out of bounds and there is something else to try."""
        failing = False
        for index in range(len(self._candidates)):
            inside = {name for name, option in found.items() if option.candidate == index}
            by_key: dict[Key, list[float]] = {}
            for gemm in final.numerics.gemms:
                if gemm.name in inside:
                    by_key.setdefault((gemm.name, gemm.gemm), []).append(gemm.sqnr_db)
            failing |= self._exclude(index, {key: lowest(values) for key, values in by_key.items()})
        return failing

    def run(self) -> Mix:
        """The cheapest mix that is in bounds as far as is known."""
        found = {layer: next(self._options(layer)) for layer in self.layers}
        if self._bounds.max_loss_gap is None or self._allowed(found):
            return found
        cheapest = dict(found)
        while not self._allowed(found) and (layer := self._next(found)) is not None:
            self._failed[layer, found[layer]] = self._moved(layer, found[layer])
            found[layer] = next(self._options(layer))
        changed = [layer for layer in found if found[layer] != cheapest[layer]]
        for layer in sorted(changed, key=lambda each: self._saved(each, cheapest, found), reverse=True):
            again = {**found, layer: cheapest[layer]}
            if self._allowed(again):
                found = again
        return found

    def _options(self, layer: str) -> Iterator[Option]:
        """What is left for `layer`, the cheapest first."""
        every = [Option(candidate=i, kept=self._in_bf16(i, layer)) for i in range(len(self._candidates))]
        gemms = self.costs.gemms(layer)
        left = [one for one in every if gemms - set(one.kept) and (layer, one) not in self._failed]
        return iter(sorted([*left, BF16], key=lambda one: self.costs(layer, one)))

    def is_dearer(self, found: Mix) -> bool:
        """Whether `found` leaves a layer in BF16 that could be quantized, since that would cost more."""
        return any(option == BF16 and len(list(self._options(layer))) > 1 for layer, option in found.items())

    def _in_bf16(self, index: int, layer: str) -> tuple[str, ...]:
        kept = self._kept[index].get(layer, [])
        return tuple(str(gemm) for gemm in Gemm if gemm in kept)

    def _next(self, found: Mix) -> str | None:
        """The layer of `found` that moves the loss most for what its next option costs more."""
        left = {
            name: option for name, option in found.items() if option != BF16 and "fprop" not in option.kept
        }
        for layer, option in left.items():
            if (layer, option) not in self._moves:
                self._bar.set_description(f"tune: the loss with {layer} alone")
                self._moves[layer, option] = self._gap({layer: option})

        def worth(layer: str) -> float:
            move = abs(self._moves[layer, found[layer]])
            us, size = self._more(layer, found[layer])
            more = us if self.costs.estimated else size
            return math.inf if math.isnan(move) or more <= 0 else move / more

        return max(left, key=worth, default=None)

    def _more(self, layer: str, option: Option) -> Cost:
        """What the next option of `layer` costs beyond `option`."""
        following = next(one for one in self._options(layer) if one != option)
        (us, size), (before, held) = self.costs(layer, following), self.costs(layer, option)
        return us - before, size - held

    def _saved(self, layer: str, cheap: Mix, dear: Mix) -> Cost:
        (us, size), (less, fewer) = self.costs(layer, dear[layer]), self.costs(layer, cheap[layer])
        return us - less, size - fewer

    def _moved(self, layer: str, option: Option) -> str:
        return f"{self._word(option)} alone moves the loss by {self._moves[layer, option]:+.4%}"

    def _allowed(self, found: Mix) -> bool:
        self._bar.set_description("tune: the loss of all together")
        return self._bounds.allows_gap(self._gap(found))

    def _gap(self, found: Mix) -> float:
        """By what share the loss differs from BF16 with the layers of `found` as it says, others in BF16."""
        everywhere = dict.fromkeys(self.layers, BF16) | dict(found)
        session = self._call.session(mixed(self._start, self.layers, self._candidates, everywhere))
        gap = loss_gap(session.run(Run(quantized=lambda _: True)).loss, self._reference)
        self._bar.update()
        return math.nan if gap is None else gap

    def _word(self, option: Option) -> str:
        return "bf16" if option == BF16 else self._candidates[option.candidate].word

    def chosen(self, found: Mix, final: Audit) -> Iterator[Chosen]:
        """What every layer got, in the order of the model."""
        for layer, option in found.items():
            values = [gemm.sqnr_db for gemm in final.numerics.gemms if gemm.name == layer]
            us, bf16 = self.costs(layer, option)[0], self.costs(layer, BF16)[0]
            yield Chosen(
                name=layer,
                use=self._word(option),
                kept=() if option == BF16 else option.kept,
                sqnr_db=lowest(values) if values else None,
                estimate_us=us if self.costs.estimated else None,
                estimate_bf16_us=bf16 if self.costs.estimated else None,
                reason="; ".join([*self._cheaper_failed(layer, option), *self._dearer(layer, option)]),
            )

    def _cheaper_failed(self, layer: str, option: Option) -> Iterator[str]:
        """Why what would cost less than `option` is no choice."""
        cost = self.costs(layer, option)
        for index, said in enumerate(self._said):
            full = Option(candidate=index, kept=())
            if layer in said and self.costs(layer, full) < cost:
                yield ", ".join(said[layer])
        yield from (
            said
            for (name, failed), said in self._failed.items()
            if name == layer and failed != option and self.costs(layer, failed) < cost
        )

    def _dearer(self, layer: str, option: Option) -> Iterator[str]:
        """What the cheapest that `layer` could be quantized to costs, where it is in BF16 for that."""
        rest = [each for each in self._options(layer) if each != BF16] if option == BF16 else []
        bf16 = self.costs(layer, BF16)[0]
        if rest and self.costs.estimated and bf16:
            us = self.costs(layer, rest[0])[0]
            yield f"{self._word(rest[0])} would take {us / bf16:.2f} of BF16's time"


def _comments(found: Mix, chosen: Sequence[Chosen]) -> Iterator[str]:
    """A sentence for the rule of every option, in the order of the rules."""
    by_name = {each.name: each for each in chosen}
    for option in dict.fromkeys(found.values()):
        layers = [by_name[name] for name, had in found.items() if had == option]
        values = [each.sqnr_db for each in layers if each.sqnr_db is not None]
        measured = f", lowest SQNR {decibels(lowest(values))} dB" if values else ""
        by_reason: dict[str, list[str]] = {}
        for each in layers:
            by_reason.setdefault(each.reason, []).append(each.name)
        reasons = "; ".join(f"{spelled(names)}: {reason}" for reason, names in by_reason.items() if reason)
        yield f"{layers[0].use}: {len(layers)} layers{measured}. {reasons}".strip()
