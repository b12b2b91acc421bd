"""The runs of a blame: a set of differing GEMMs follows the policy, all others follow the reference.

If the reference does not quantize any differing GEMM, one trace of the model serves all runs: the interpreter
runs its graphs with single GEMMs switched on and off. If both policies quantize a GEMM in different formats,
every run traces the model under its own policy, and only whole layers are compared.
"""

from __future__ import annotations

import math
from functools import partial

from mxcompile.analysis.blame.blamed import Effect, effect_of
from mxcompile.analysis.study.mixes import BF16, Candidate, Mixes, Option
from mxcompile.analysis.study.session import Keys, Outcome, Study
from mxcompile.formats import ElemRounding, is_quantized
from mxcompile.policy import Gemm, Policy
from mxcompile.policy.model import Saved
from mxcompile.report.data.fold import spelled


class BlameTrials:
    """Runs with some GEMMs as in `policy`, which `study` runs, and the others as in `against`.

    Each set of GEMMs runs once, for every repeat. backward: whether to measure gradients, if there are any.

    keys: (layer, GEMM) pairs that the policies decide differently, in the order of the model. layers: their
    layers. switched: whether the reference quantizes none of `keys`. drew: whether the first run drew random
    numbers. references: outcomes of the reference so far, one per repeat.
    """

    def __init__(self, study: Study, policy: Policy, against: Policy, backward: bool) -> None:
        self.study = study
        self._policy, self._against = policy, against
        _, first = study.run(study.session, lambda _: False, backward=backward)
        self.drew, self._backward = first.drew, first.gradients is not None
        self._kinds = tuple(Gemm) if self._backward else (Gemm.FPROP,)
        keys, self.switched = [], True
        for name, layer in study.layers.items():
            before, after = against.decide(layer), policy.decide(layer)
            for gemm in self._kinds:
                a, b = before.choice(gemm), after.choice(gemm)
                key, alone = (name, str(gemm)), not is_quantized(a.precision)
                differ = (a.precision, a.formats) != (b.precision, b.formats)
                if (alone and key in study.quantized) or (not alone and differ):
                    keys.append(key)
                    self.switched &= alone
        self.keys = tuple(keys)
        self.layers = tuple(dict.fromkeys(name for name, _ in self.keys))
        self._effects: dict[Keys, Effect] = {}
        of_kinds = {site.key for site in study.session.sites.products if site.tag.gemm in self._kinds}
        self._same = frozenset(of_kinds) - frozenset(self.keys)
        self.references = [first] if self.switched and not self._same else []

    def repeat(self, count: int) -> None:
        """Runs the reference `count` times, each with different random numbers."""
        while len(self.references) < count:
            seed = len(self.references)
            self.references.append(self._outcome(frozenset(), seed, "the reference"))
        pairs = ((reference, reference) for reference in self.references)
        self._effects[frozenset()] = effect_of(self.study.gemms, pairs)

    @property
    def self_effect(self) -> Effect:
        """Effect of the reference on itself: 0 if it is finite."""
        return self._effects[frozenset()]

    def effect(self, keys: Keys, description: str) -> Effect:
        """Returns the effect of quantizing only `keys`. description: their name in the progress bar."""
        if keys not in self._effects:
            pairs = (
                (reference, self._outcome(keys, seed, description))
                for seed, reference in enumerate(self.references)
            )
            self._effects[keys] = effect_of(self.study.gemms, pairs)
        return self._effects[keys]

    def knows(self, keys: Keys) -> bool:
        """Whether the effect of `keys` was already measured."""
        return keys in self._effects

    def without(self, keys: Keys) -> tuple[Policy, tuple[str, ...]]:
        """Returns the policy with `keys` as in the reference, and comments of its new rules."""
        by_layer: dict[str, list[str]] = {}
        for name, gemm in self.keys:
            if (name, gemm) in keys:
                by_layer.setdefault(name, []).append(gemm)
        candidates = [Candidate.start(self._policy), Candidate(word="reference", policy=self._against)]
        label = "policy without the worst"
        mixes = Mixes(start=self._policy, layers=self.study.layers, candidates=candidates, label=label)
        mix = {}
        for name, kept in by_layer.items():
            cast = {gemm for layer, gemm in self.study.quantized if layer == name}
            option = BF16 if cast <= set(kept) else Option(candidate=0, kept=tuple(kept))
            mix[name] = option if self.switched else Option(candidate=1)
        return mixes.policy(mix), tuple(
            f"{spelled(names)}: {', '.join(by_layer[names[0]])} as in {self._against.label}"
            for names in mixes.uses(mix).values()
        )

    def obstacles(self, measure: str) -> list[str]:
        """Returns the reasons against a search for an effect on `measure`; empty if a search is possible."""
        label, against = self._policy.label, self._against.label
        if not self.keys:
            return [f"nothing differs: {label} treats all GEMMs of this run as {against} does"]
        if math.isinf(self.self_effect.on(measure).mean):
            verb = "are" if measure == "gradients" else "is"
            return [
                f"the {measure} {verb} not finite under {against} either: quantization by {label} is not the"
                " cause"
            ]
        return []

    def notes(self) -> list[str]:
        """Returns remarks on how the effects were measured."""
        decisions = [self._policy.decide(layer) for layer in self.study.layers.values()]
        formats = [form for d in decisions for gemm in Gemm if (form := d.choice(gemm).formats)]
        notes = []
        if not self.switched:
            notes.append(
                "both policies quantize some of these GEMMs: every run traced the model anew, and the GEMMs"
                " of a layer were measured together"
            )
            if self.drew and any(form.dy.elements is ElemRounding.STOCHASTIC for form in formats):
                notes.append(
                    "stochastic rounding draws a seed in each trace, so dropout may differ between runs:"
                    " every effect includes differences in dropout"
                )
        elif any(decision.saved is Saved.MXFP8 for decision in decisions):
            notes.append("all runs, the reference too, save the same inputs in MXFP8 for backward")
        return notes

    def _outcome(self, keys: Keys, seed: int, description: str) -> Outcome:
        """Returns the outcome of a run with `keys` as in the policy and other GEMMs as in the reference.

        seed: number of the repeat, which seeds the generators; 0 keeps their state.
        """
        run = partial(self.study.run, description=description, backward=self._backward, seed=seed or None)
        session, different = self.study.session, frozenset(self.keys)
        if self.switched:
            return run(session, (keys | self._same).__contains__)[1]
        if keys != different:
            session = session.under(self.without(different - keys)[0] if keys else self._against)
        return run(session)[1]
