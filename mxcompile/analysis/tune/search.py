"""`tune`: finds for every layer the cheapest of several precisions within an error bound, by measurement.

    cost     estimated time of a layer's GEMMs and casts on a target (see `offline/record_work.py`), 0 if the
             target has no data sheet, then the bytes of their operands
    SQNR     the model runs under each precision; a GEMM below the bound stays in BF16 under this precision
    loss     each layer runs alone in its option; the layer with the largest change of the loss per extra
             cost of its next option gets that option, until the loss of all layers together is within the
             bound; then layers return to the cheaper option where the bound allows it

BF16 is an option of every layer. Without a list of precisions the only other option is the decision of the
start policy. The result is audited at the end, and GEMMs that fail only together are excluded as well.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from tqdm import tqdm

from mxcompile.analysis.audit import Audit, audited, loss_gap
from mxcompile.analysis.audit.text import decibels
from mxcompile.analysis.study.interpreter import Key
from mxcompile.analysis.study.mixes import BF16, GEMMS, Candidate, Mix, Mixes, Option
from mxcompile.analysis.study.session import MAKE_A_LOSS, LossFunction, Session, Study
from mxcompile.analysis.study.stats import lowest_by
from mxcompile.analysis.tune.tuned import Bounds, Chosen, Tuned
from mxcompile.errors import ModelError, OptionError
from mxcompile.formats import is_quantized
from mxcompile.lowering.targets import AUTO, check
from mxcompile.models.arguments import ModelInput, keywords
from mxcompile.offline.record_work import estimate, operand_bytes
from mxcompile.policy import Gemm, Policy
from mxcompile.report import GemmRecord, Report
from mxcompile.report.data.fold import grouped, spelled
from mxcompile.report.data.numerics import lowest
from mxcompile.report.forms.words import count


class Trials:
    """The runs of a model in mixes of `candidates`, and the GEMMs below the SQNR bound.

    mixes: mixes of the candidates for the layers that the policy `start` quantizes. sessions: a session for
    each candidate, with all these layers in it. below: by candidate, layer and GEMM, the reasons of the GEMMs
    that stay in BF16.
    """

    def __init__(self, study: Study, start: Policy, candidates: Sequence[Candidate], bounds: Bounds) -> None:
        self._loss = study.run(study.session, lambda _: False)[1].loss
        if bounds.max_loss_gap is not None and self._loss is None:
            raise ModelError(f"`max_loss_gap` needs a loss: {MAKE_A_LOSS}")
        names = {name for name, _ in study.quantized}
        layers = {name: layer for name, layer in study.layers.items() if name in names}
        self.mixes = Mixes(start=start, layers=layers, candidates=candidates, label="tuned policy")
        self.below: list[dict[str, dict[str, str]]] = [{} for _ in candidates]
        self.study, self._bounds = study, bounds
        self.sessions = [self._everywhere(index) for index in range(len(candidates))]

    def _everywhere(self, index: int) -> Session:
        """Returns a session with all layers in candidate `index`, and excludes its GEMMs below the bound."""
        candidate, session = self.mixes.candidates[index], self.study.session
        if candidate.use is not None:
            session = session.under(
                self.mixes.policy(dict.fromkeys(self.mixes.layers, Option(candidate=index)))
            )
        description = f"everything in {candidate.word}"
        if self._bounds.min_sqnr is None:
            self.study.run(session, lambda _: False, description)  # captures the graphs
            return session
        below, failing = self.below[index], True
        while failing:
            run, _ = self.study.run(
                session,
                lambda key: key[1] not in below.get(key[0], ()),
                description,
                observe=True,
                backward=True,
            )
            products = session.sites.products
            sqnr = ((products[site].key, stats.sums.sqnr_db) for site, stats in run.products.items())
            failing = self._exclude(index, lowest_by(sqnr))
            description = f"the rest in {candidate.word}"
        return session

    def _exclude(self, index: int, sqnr: Mapping[Key, float]) -> bool:
        """Leaves GEMMs in BF16 that miss the SQNR bound under candidate `index`. Returns whether any did."""
        failing = {key: value for key, value in sqnr.items() if not self._bounds.allows_sqnr(value)}
        # NaN propagates to all later GEMMs, so only the first is known to be the cause
        finite = {key: value for key, value in failing.items() if not math.isnan(value)}
        for (layer, gemm), value in (finite or dict(itertools.islice(failing.items(), 1))).items():
            reason = f"{gemm} {decibels(value)} dB in {self.mixes.candidates[index].word}"
            self.below[index].setdefault(layer, {})[gemm] = reason
        return bool(failing)

    def audit(self, mix: Mix) -> tuple[Audit, bool]:
        """Returns the audit of `mix`, and whether a GEMM is below the bound. Excludes such GEMMs."""
        self.study.bar.set_description("tune: audit of the policy")
        final = audited(self.study.session.under(self.mixes.policy(mix)))
        self.study.bar.update()
        failing = False
        for index in range(len(self.sessions)):
            inside = {name for name, option in mix.items() if option.candidate == index}
            measured = (gemm for gemm in final.numerics.gemms if gemm.name in inside)
            sqnr = lowest_by(((gemm.name, gemm.gemm), gemm.sqnr_db) for gemm in measured)
            failing |= self._exclude(index, sqnr)
        return final, failing

    def gap(self, mix: Mix, description: str) -> float:
        """Returns the relative difference of the loss of `mix` from BF16's. Layers not in `mix` are BF16."""
        used = {option.candidate for option in mix.values() if option != BF16}
        if len(used) > 1:
            whole = self.mixes.policy(dict.fromkeys(self.mixes.layers, BF16) | dict(mix))
            _, outcome = self.study.run(self.study.session.under(whole), description=description)
        else:
            session = self.sessions[max(used, default=0)]
            _, outcome = self.study.run(
                session, lambda key: key[1] not in mix.get(key[0], BF16).kept, description=description
            )
        gap = loss_gap(outcome.loss, self._loss)
        return math.nan if gap is None else gap


Cost = tuple[float, float]
"""Estimated time in µs, bytes of the operands."""


class Costs:
    """The costs of options, from the reports of all candidates, which have the same GEMMs."""

    def __init__(self, reports: Sequence[Report], target: str) -> None:
        self._of: dict[tuple[str, int, str], Cost] = {}
        self._quantized: set[tuple[str, int, str]] = set()
        self.estimated = False
        for index, report in enumerate(reports):
            aimed = dataclasses.replace(report.summary, target=target)
            estimated = estimate(dataclasses.replace(report, summary=aimed))
            self.estimated = estimated.summary.estimate_us is not None
            for gemm in estimated.gemms:
                quantized, bf16 = operand_bytes(gemm)
                self._add(gemm, index, gemm.estimate_us, quantized)
                if not index:
                    self._add(gemm, BF16.candidate, gemm.estimate_bf16_us, bf16)

    def _add(self, gemm: GemmRecord, candidate: int, us: float | None, num_bytes: float) -> None:
        key = gemm.name, candidate, gemm.gemm
        before = self._of.get(key, (0.0, 0.0))
        self._of[key] = before[0] + (us or 0.0), before[1] + num_bytes
        if is_quantized(gemm.precision):
            self._quantized.add(key)

    def __call__(self, layer: str, option: Option) -> Cost:
        """Returns the cost of `layer` with `option`."""
        costs = [
            self._of.get((layer, BF16.candidate if gemm in option.kept else option.candidate, gemm), (0, 0))
            for gemm in GEMMS
        ]
        return round(sum(us for us, _ in costs), 6), sum(size for _, size in costs)

    def quantized(self, layer: str, candidate: int) -> frozenset[str]:
        """Returns the kinds of GEMMs of `layer` that the candidate quantizes."""
        return frozenset(gemm for gemm in GEMMS if (layer, candidate, gemm) in self._quantized)


def tune(
    model: nn.Module,
    *args: Any,
    min_sqnr: float | None = None,
    max_loss_gap: float | None = None,
    policy: Policy | str | dict[str, Any] | None = None,
    among: Sequence[str] = (),
    target: str = AUTO,
    loss_fn: LossFunction | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **inputs: ModelInput,
) -> Tuned:
    """Finds the policy that keeps most of `model` quantized with the error of a call within bounds.

    Args:
        model: model as for `audit`. It is not changed.
        *args: positional arguments of the call.
        min_sqnr: least SQNR in dB of the output of every quantized GEMM against FP32.
        max_loss_gap: largest relative difference of the loss from BF16's (0.002 for 0.2 %).
        policy: policy to start from, as in the backend's option. Only layers that it quantizes are
            considered.
        among: precisions and presets to mix; each layer gets the cheapest on `target` within the bounds.
            Without them, a layer follows `policy` or stays in BF16.
        target: chip whose estimates give the costs of a mix.
        loss_fn: as for `audit`.
        kwargs: keyword arguments of the call that are also options of this function.
        **inputs: keyword arguments of the call (see `models.arguments`).

    Returns:
        A `Tuned`; its ``met`` is whether a policy within the bounds was found.

    Raises:
        OptionError: for missing or invalid bounds, unknown words, or `target` without `among`.
        TargetError: for an unknown target.
        ModelError: if the model cannot be captured or has no loss to bound.
    """
    named = keywords("tune", locals())
    bounds = Bounds(min_sqnr=min_sqnr, max_loss_gap=max_loss_gap)
    check_mix(among, target)
    start = Policy.resolve(policy)
    candidates = [Candidate.parse(word, start.base.formats) for word in dict.fromkeys(among)]
    chip = check(target) if among else ""
    session = Session(model, args, named, policy=start, loss_fn=loss_fn)
    with tqdm(desc="tune: tracing", unit="run", disable=None, leave=False) as bar:
        trials = Trials(Study(session, bar, "tune"), start, candidates or [Candidate.start(start)], bounds)
        tuned = _Search(trials, bounds, chip).tuned()
    if among and not tuned.target:
        return tuned.with_note("chosen by bytes of operands: no target with a data sheet was named")
    return tuned


def check_mix(among: Sequence[str], target: str) -> None:
    """Raises `OptionError` if `among` is a string, or if `target` is set without `among`."""
    if isinstance(among, str):
        raise OptionError(
            f"`among` must be a list of precisions and presets, found {among!r}: write [{among!r}]"
        )
    if target != AUTO and not among:
        raise OptionError("`target` is for a mix of precisions: name them in `among`, or leave `target` out")


class _Search:
    """State of one search: the excluded options and the reasons.

    target: target of the cost estimates; "" compares the bytes of operands only.
    """

    def __init__(self, trials: Trials, bounds: Bounds, target: str) -> None:
        self._trials, self._bounds, self._target = trials, bounds, target
        self._mixes, self._bar = trials.mixes, trials.study.bar
        self._costs = Costs([session.report() for session in trials.sessions], target)
        self._failed: dict[tuple[str, Option], str] = {}
        self._moves: dict[tuple[str, Option], float] = {}

    def tuned(self) -> Tuned:
        """Returns the cheapest mix whose audit is within the bounds, or the last mix tried."""
        failing = True
        while failing:
            mix = self._cheapest()
            final, failing = self._trials.audit(mix)
        bounds, chosen = self._bounds, tuple(self._chosen(mix, final))
        quantized = {gemm.gemm for gemm in final.report.gemms if is_quantized(gemm.precision)}
        is_bound = "fprop" in quantized if bounds.max_loss_gap is not None else bool(quantized)
        # a layer that could be quantized is in BF16, because that costs less
        is_dearer = any(option == BF16 and len(self._options(layer)) > 1 for layer, option in mix.items())
        return Tuned(
            policy=self._mixes.policy(mix),
            bounds=bounds,
            chosen=chosen,
            comments=tuple(self._comments(mix, chosen)),
            audit=final,
            flop_share_before=self._trials.study.flop_share(),
            met=bounds.allow(final.numerics) and (is_bound or is_dearer),
            target=self._target if self._costs.estimated else "",
        )

    def _cheapest(self) -> Mix:
        """Returns the cheapest mix that is within the bounds according to the runs so far."""
        mix = {layer: self._options(layer)[0] for layer in self._mixes.layers}
        if self._bounds.max_loss_gap is None or self._allowed(mix):
            return mix
        cheapest = dict(mix)
        while not self._allowed(mix) and (layer := self._next(mix)) is not None:
            moved = f"{self._moves[layer, mix[layer]]:+.4%}"
            self._failed[layer, mix[layer]] = f"{self._word(mix[layer])} alone moves the loss by {moved}"
            mix[layer] = self._options(layer)[0]
        changed = [layer for layer in mix if mix[layer] != cheapest[layer]]
        for layer in sorted(
            changed, key=lambda name: self._more(name, cheapest[name], mix[name]), reverse=True
        ):
            trial = {**mix, layer: cheapest[layer]}
            if self._allowed(trial):
                mix = trial
        return mix

    def _options(self, layer: str) -> list[Option]:
        """Returns the remaining options of `layer`, the cheapest first."""
        options = [BF16]
        for index, below in enumerate(self._trials.below):
            kept = {*below.get(layer, ())}
            forms = [kept]
            if len(self._mixes.candidates) == 1 and self._bounds.max_loss_gap is not None:
                forms.append(kept | {str(Gemm.FPROP)})
            quantized = self._costs.quantized(layer, index)
            options += [
                Option(candidate=index, kept=tuple(gemm for gemm in GEMMS if gemm in form))
                for form in forms
                if quantized - form
            ]
        untried = [option for option in options if (layer, option) not in self._failed]
        return sorted(untried, key=lambda option: self._costs(layer, option))

    def _next(self, mix: Mix) -> str | None:
        """Returns the layer with the largest change of the loss per extra cost of its next option."""
        moves = {
            layer: option for layer, option in mix.items() if option != BF16 and "fprop" not in option.kept
        }
        unknown = [layer for layer, option in moves.items() if (layer, option) not in self._moves]
        self._bar.total = self._bar.n + len(unknown) + 2
        for layer in unknown:
            alone = {layer: moves[layer]}
            self._moves[layer, moves[layer]] = self._trials.gap(alone, f"the loss with {layer} alone")

        def worth(layer: str) -> float:
            move = abs(self._moves[layer, mix[layer]])
            following = next(option for option in self._options(layer) if option != mix[layer])
            us, size = self._more(layer, mix[layer], following)
            more = us if self._costs.estimated else size
            return math.inf if math.isnan(move) or more <= 0 else move / more

        return max(moves, key=worth, default=None)

    def _more(self, layer: str, cheap: Option, dear: Option) -> Cost:
        (us, size), (less, fewer) = self._costs(layer, dear), self._costs(layer, cheap)
        return us - less, size - fewer

    def _allowed(self, mix: Mix) -> bool:
        return self._bounds.allows_gap(self._trials.gap(mix, "the loss of all together"))

    def _word(self, option: Option) -> str:
        return "bf16" if option == BF16 else self._mixes.candidates[option.candidate].word

    def _chosen(self, mix: Mix, final: Audit) -> Iterator[Chosen]:
        """Yields the choice for every layer with its own rule, in the order of the model."""
        named = {layer for layers in self._mixes.uses(mix).values() for layer in layers}
        sqnr = lowest_by((gemm.name, gemm.sqnr_db) for gemm in final.numerics.gemms)
        for layer, option in mix.items():
            if layer not in named:
                continue
            cost, bf16 = self._costs(layer, option), self._costs(layer, BF16)[0]
            reasons = [
                ", ".join(below[layer].values())
                for index, below in enumerate(self._trials.below)
                if layer in below and self._costs(layer, Option(candidate=index)) < cost
            ]
            reasons += [
                moved
                for (name, failed), moved in self._failed.items()
                if name == layer and failed != option and self._costs(layer, failed) < cost
            ]
            rest = [other for other in self._options(layer) if other != BF16] if option == BF16 else []
            if rest and self._costs.estimated and bf16:
                share = self._costs(layer, rest[0])[0] / bf16
                reasons.append(f"{self._word(rest[0])} would take {share:.2f} of BF16's time")
            yield Chosen(
                name=layer,
                use=self._word(option),
                kept=() if option == BF16 else option.kept,
                sqnr_db=sqnr.get(layer),
                estimate_us=cost[0] if self._costs.estimated else None,
                estimate_bf16_us=bf16 if self._costs.estimated else None,
                reason="; ".join(reasons),
            )

    def _comments(self, mix: Mix, chosen: Sequence[Chosen]) -> Iterator[str]:
        by_name = {layer.name: layer for layer in chosen}
        for names in self._mixes.uses(mix).values():
            layers = [by_name[name] for name in names]
            values = [layer.sqnr_db for layer in layers if layer.sqnr_db is not None]
            measured = f", lowest SQNR {decibels(lowest(values))} dB" if values else ""
            by_reason = grouped(layers, lambda layer: layer.reason)
            reasons = "; ".join(
                f"{spelled(layer.name for layer in same)}: {reason}"
                for reason, same in by_reason.items()
                if reason
            )
            yield f"{layers[0].use}: {count(len(layers), 'layer')}{measured}. {reasons}".strip()
