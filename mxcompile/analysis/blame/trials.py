"""The runs of a blame: a set of differing GEMMs follows the policy, all others follow the reference.

If the reference does not quantize any differing GEMM, one trace of the model serves all runs: the audit
interpreter runs its graphs with single GEMMs switched on and off. If both policies quantize a GEMM in
different formats, every run traces the model under its own policy, and only whole layers are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mxcompile.analysis.audit import Outcome, Run, Session
from mxcompile.analysis.audit.interpreter import Key
from mxcompile.analysis.audit.state_guard import drawing
from mxcompile.analysis.blame.effects import Effect, effect_of
from mxcompile.analysis.tune.candidates import BF16, Candidate, Option, by_use, mixed, stated
from mxcompile.analysis.tune.measure import ModelCall
from mxcompile.formats import ElemRounding, is_quantized
from mxcompile.policy import Gemm, Layer, Policy, Use
from mxcompile.policy.model import Saved
from mxcompile.report import GemmRecord
from mxcompile.rules import layers_of

Keys = frozenset[Key]

LABEL = "policy without the worst"


@dataclass(frozen=True, kw_only=True, slots=True)
class Differences:
    """The GEMMs for which two policies decide differently.

    keys: (layer, GEMM) pairs in the order of the model. layers: all layers of the model, by name. switched:
    whether the reference quantizes none of `keys`.
    """

    keys: tuple[Key, ...]
    layers: Mapping[str, Layer]
    switched: bool

    @classmethod
    def between(
        cls, gemms: tuple[GemmRecord, ...], policy: Policy, against: Policy, backward: bool
    ) -> Differences:
        """Returns the differences of `policy`, whose records are `gemms`, from `against`."""
        layers = {layer.name: layer for layer in layers_of(gemms)}
        keys, switched = [], True
        for name, layer in layers.items():
            before = against.decide(layer)
            cast = {gemm.gemm for gemm in gemms if gemm.name == name and is_quantized(gemm.precision)}
            for gemm in Gemm if backward else (Gemm.FPROP,):
                a, b = before.choice(gemm), policy.decide(layer).choice(gemm)
                alone = not is_quantized(a.precision)
                differ = (a.precision, a.formats) != (b.precision, b.formats)
                if (alone and gemm in cast) or (not alone and differ):
                    keys.append((name, str(gemm)))
                    switched &= alone
        return cls(keys=tuple(keys), layers=layers, switched=switched)


class BlameTrials:
    """Runs of `call` with some GEMMs as in `policy` and the others as in `against`, each set of GEMMs once.

    backward: whether to measure gradients, if there are any. on_run: called before every run. runs: number of
    runs so far. drew: whether the first run drew random numbers. Raises `ModelError` if the model cannot run.
    """

    def __init__(
        self,
        call: ModelCall,
        policy: Policy,
        against: Policy,
        backward: bool,
        on_run: Callable[[str], object],
    ) -> None:
        self.runs = 0
        self._call, self._policy, self._against = call, policy, against
        self._backward, self._on_run = backward, on_run
        self._session = call.session(policy)
        self._effects: dict[Keys, Effect] = {}
        first = self._run(self._session, lambda _: False, None, "tracing")
        self.drew = first.drew
        self._backward = first.gradients is not None
        self.gemms = self._session.report().gemms
        self.differences = Differences.between(self.gemms, policy, against, self._backward)
        kinds = {str(gemm) for gemm in Gemm if self._backward or gemm is Gemm.FPROP}
        own = {site.key for site in self._session.sites.products if site.tag.gemm in kinds}
        self._same = frozenset(own) - frozenset(self.differences.keys)
        self._references = [first] if self.differences.switched and not self._same else []

    @property
    def to_come(self) -> int:
        """Number of runs that the reference needs in addition to its repeats."""
        return 1 - len(self._references)

    def repeat(self, count: int) -> None:
        """Runs the reference `count` times, each with different random numbers."""
        while len(self._references) < count:
            seed = len(self._references)
            self._references.append(self._outcome(frozenset(), seed, "the reference"))
        self._effects[frozenset()] = effect_of(self.gemms, ((each, each) for each in self._references))

    def effect(self, keys: Keys, what: str) -> Effect:
        """Returns the effect of quantizing only `keys`. what: their name in the progress bar."""
        if keys not in self._effects:
            pairs = (
                (reference, self._outcome(keys, seed, what))
                for seed, reference in enumerate(self._references)
            )
            self._effects[keys] = effect_of(self.gemms, pairs)
        return self._effects[keys]

    def knows(self, keys: Keys) -> bool:
        """Whether the effect of `keys` was already measured."""
        return keys in self._effects

    def without(self, keys: Keys) -> tuple[Policy, dict[Use, list[str]]]:
        """Returns the policy with `keys` as in the reference, and the layers of its new rules."""
        layers = self.differences.layers
        names = [name for name in layers if any(name == layer for layer, _ in keys)]
        if self.differences.switched:
            mix = {name: self._option(name, keys) for name in names}
            uses = by_use(self._policy, layers, [Candidate.start(self._policy)], mix)
        else:
            uses = {}
            for name in names:
                use = stated(self._against, layers[name], self._policy.base.formats)
                uses.setdefault(use, []).append(name)
        return mixed(self._policy, uses, layers, LABEL), uses

    def flop_share(self, removed: Keys = frozenset()) -> float:
        """Returns the quantized share of the matmul FLOPs with `removed` as in the reference."""
        total = sum(gemm.flops for gemm in self.gemms)
        kept = sum(
            gemm.flops
            for gemm in self.gemms
            if is_quantized(gemm.precision) and (gemm.name, gemm.gemm) not in removed
        )
        return kept / total if total else 0.0

    def notes(self) -> list[str]:
        """Returns remarks on how the effects were measured."""
        decisions = [self._policy.decide(layer) for layer in self.differences.layers.values()]
        formats = [form for d in decisions for gemm in Gemm if (form := d.choice(gemm).formats)]
        notes = []
        if not self.differences.switched:
            notes.append(
                "both policies quantize some of these GEMMs: every run traced the model anew, and the GEMMs"
                " of a layer were not told apart"
            )
            if self.drew and any(form.dy.elements is ElemRounding.STOCHASTIC for form in formats):
                notes.append(
                    "stochastic rounding draws a seed in each trace, so dropout may differ between runs: a"
                    " part of every effect is of dropout"
                )
        elif any(decision.saved is Saved.MXFP8 for decision in decisions):
            notes.append("what is saved in MXFP8 for backward is so in every run, also in the reference's")
        return notes

    def _option(self, name: str, keys: Keys) -> Option:
        """Returns the option for layer `name` that leaves its GEMMs in `keys` unquantized."""
        cast = {gemm.gemm for gemm in self.gemms if gemm.name == name and is_quantized(gemm.precision)}
        kept = tuple(str(gemm) for gemm in Gemm if (name, str(gemm)) in keys)
        return BF16 if cast <= set(kept) else Option(candidate=0, kept=kept)

    def _outcome(self, keys: Keys, seed: int, what: str) -> Outcome:
        """Returns the outcome with `keys` as in the policy. seed: repeat; 0 keeps the generators' state."""
        if self.differences.switched:
            on = keys | self._same
            return self._run(self._session, on.__contains__, seed or None, what)
        off = frozenset(self.differences.keys) - keys
        if len(off) == len(self.differences.keys):
            session = self._call.session(self._against)
        else:
            session = self._call.session(self.without(off)[0]) if off else self._session
        return self._run(session, lambda _: True, seed or None, what)

    def _run(
        self, session: Session, quantized: Callable[[Key], bool], seed: int | None, what: str
    ) -> Outcome:
        self._on_run(what)
        self.runs += 1
        with drawing(seed):
            return session.run(Run(quantized=quantized), backward=self._backward)
