"""The model runs of a tuning: all layers in each candidate, the SQNR of the GEMMs, and the loss of a mix."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from mxcompile.analysis.audit import Audit, audited, loss_gap
from mxcompile.analysis.audit.text import decibels
from mxcompile.analysis.study.interpreter import Key
from mxcompile.analysis.study.mixes import BF16, Candidate, Mix, Mixes, Option
from mxcompile.analysis.study.session import MAKE_A_LOSS, Session, Study
from mxcompile.analysis.study.stats import lowest_by
from mxcompile.analysis.tune.tuned import Bounds
from mxcompile.errors import ModelError
from mxcompile.policy import Policy


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
        while self._fails_in(session, index, description):
            description = f"the rest in {candidate.word}"
        return session

    def _fails_in(self, session: Session, index: int, description: str) -> bool:
        """Whether a GEMM is below the bound with all others in candidate `index`. It is then excluded."""
        below = self.below[index]
        run, _ = self.study.run(
            session, lambda key: key[1] not in below.get(key[0], ()), description, observe=True, backward=True
        )
        products = session.sites.products
        sqnr = ((products[site].key, stats.sums.sqnr_db) for site, stats in run.products.items())
        return self._exclude(index, lowest_by(sqnr))

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
