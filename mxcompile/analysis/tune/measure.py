"""The model runs of a tuning: all layers in each candidate, the SQNR of the GEMMs, and the loss of a mix."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from tqdm import tqdm

from mxcompile.analysis.audit import Audit, Run, Session, audit, loss_gap
from mxcompile.analysis.audit.interpreter import Key
from mxcompile.analysis.audit.session import LossFunction
from mxcompile.analysis.audit.text import decibels
from mxcompile.analysis.tune.bounds import Bounds
from mxcompile.analysis.tune.candidates import BF16, Candidate, Mix, Option, by_use, mixed
from mxcompile.formats import is_quantized
from mxcompile.policy import Layer, Policy, Use
from mxcompile.report import Report
from mxcompile.report.numerics import lowest
from mxcompile.rules import layers_of


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCall:
    """One call of a model: the arguments of `Session`."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss_fn: LossFunction | None

    def session(self, policy: Policy) -> Session:
        """Returns a session of the call under `policy`."""
        return Session(self.model, self.args, self.kwargs, policy=policy, loss_fn=self.loss_fn)

    def audit(self, policy: Policy) -> Audit:
        """Returns the audit of the call under `policy`."""
        return audit(self.model, *self.args, policy=policy, loss_fn=self.loss_fn, kwargs=self.kwargs)


class Trials:
    """The runs of a model under `candidates`, and its GEMMs below the SQNR bound.

    layers: layers that the policy `start` quantizes. kept: by candidate and layer, the GEMMs that stay in
    BF16. below: the reasons, as texts. flop_share: quantized share of the FLOPs under `start`. bar: progress
    bar.
    """

    def __init__(
        self, call: ModelCall, start: Policy, candidates: Sequence[Candidate], bounds: Bounds, bar: tqdm[Any]
    ) -> None:
        self.candidates = candidates
        self.bar = bar
        self.kept: list[dict[str, list[str]]] = [{} for _ in candidates]
        self.below: list[dict[str, list[str]]] = [{} for _ in candidates]
        self._start = start
        self._call = call
        self._bounds = bounds
        session = call.session(start)
        self._reference = session.run(Run(quantized=lambda _: False)).loss
        bar.update()
        bounds.check_loss(self._reference)
        self.flop_share = session.report().summary.flop_share
        self.layers = _quantized_layers(session.report())
        self._sessions = [self._session(index, session) for index in range(len(candidates))]

    @property
    def reports(self) -> list[Report]:
        """The reports of all candidates."""
        return [session.report() for session in self._sessions]

    def policy(self, mix: Mix) -> Policy:
        """Returns the policy of `mix`."""
        return mixed(self._start, self.by_use(mix), self.layers)

    def by_use(self, mix: Mix) -> dict[Use, list[str]]:
        """Returns the layers of each rule in the policy of `mix`, in the order of their first layers."""
        return by_use(self._start, self.layers, self.candidates, mix)

    def audit(self, mix: Mix) -> Audit:
        """Returns the audit of `mix`."""
        self.bar.set_description("tune: audit of the policy")
        measured = self._call.audit(self.policy(mix))
        self.bar.update()
        return measured

    def _session(self, index: int, started: Session) -> Session:
        """Returns a session with all layers in candidate `index`, and excludes its GEMMs below the bound."""
        self.bar.set_description(f"tune: everything in {self.candidates[index].word}")
        everywhere = dict.fromkeys(self.layers, Option(candidate=index, kept=()))
        whole = self.candidates[index].use is None
        session = started if whole else self._call.session(self.policy(everywhere))
        if self._bounds.min_sqnr is None:
            session.run(Run(quantized=lambda _: False))
            self.bar.update()
            return session
        while self._exclude(index, self._sqnr(session, index)):
            self.bar.set_description(f"tune: the rest in {self.candidates[index].word}")
        return session

    def _sqnr(self, session: Session, index: int) -> dict[Key, float]:
        """Returns the lowest SQNR of each quantized GEMM, in the order of execution."""
        kept = self.kept[index]
        run = Run(quantized=lambda key: key[1] not in kept.get(key[0], ()), observe=True)
        session.run(run, backward=True)
        self.bar.update()
        values: dict[Key, list[float]] = {}
        for site, stats in run.products.items():
            values.setdefault(session.sites.products[site].key, []).append(stats.sums.sqnr_db)
        return {key: lowest(each) for key, each in values.items()}

    def _exclude(self, index: int, sqnr: Mapping[Key, float]) -> bool:
        """Keeps the GEMMs below the bound in BF16 under candidate `index`. Returns whether there were any."""
        failing = {key: value for key, value in sqnr.items() if not self._bounds.allows_sqnr(value)}
        # NaN propagates to all later GEMMs, so only the first is known to be the cause
        finite = {key: value for key, value in failing.items() if not math.isnan(value)}
        for (layer, gemm), value in (finite or dict(itertools.islice(failing.items(), 1))).items():
            self.kept[index].setdefault(layer, []).append(gemm)
            below = f"{gemm} {decibels(value)} dB in {self.candidates[index].word}"
            self.below[index].setdefault(layer, []).append(below)
        return bool(failing)

    def fails(self, mix: Mix, final: Audit) -> bool:
        """Whether a GEMM in the audit of `mix` is below the bound; the GEMM is then excluded."""
        failing = False
        for index in range(len(self.candidates)):
            inside = {name for name, option in mix.items() if option.candidate == index}
            by_key: dict[Key, list[float]] = {}
            for gemm in final.numerics.gemms:
                if gemm.name in inside:
                    by_key.setdefault((gemm.name, gemm.gemm), []).append(gemm.sqnr_db)
            failing |= self._exclude(index, {key: lowest(values) for key, values in by_key.items()})
        return failing

    def gap(self, mix: Mix) -> float:
        """Returns the relative difference of the loss of `mix` from BF16's. Layers not in `mix` are BF16."""
        used = {option.candidate for option in mix.values() if option != BF16}
        if len(used) > 1:
            session = self._call.session(self.policy(dict.fromkeys(self.layers, BF16) | dict(mix)))
            run = Run(quantized=lambda _: True)
        else:
            session = self._sessions[max(used, default=0)]
            run = Run(quantized=lambda key: key[1] not in mix.get(key[0], BF16).kept)
        gap = loss_gap(session.run(run).loss, self._reference)
        self.bar.update()
        return math.nan if gap is None else gap


def _quantized_layers(report: Report) -> dict[str, Layer]:
    """Returns the layers that have a quantized GEMM in `report`."""
    names = {gemm.name for gemm in report.gemms if is_quantized(gemm.precision)}
    return {layer.name: layer for layer in layers_of(report.gemms) if layer.name in names}
