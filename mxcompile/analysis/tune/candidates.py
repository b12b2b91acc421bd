"""What a layer may be quantized to in a mix: candidates, what each would cost, and the policy of a mix.

A candidate is a precision's word or a preset's: what it asks of the three GEMMs of a layer. Its cost is the
roofline's estimate of the layer's GEMMs and casts on a target (see `mxcompile.explain.roofline`), 0 where the
target has no data sheet, then the bytes of the operands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mxcompile.analysis.explain.roofline import estimate, operand_bytes
from mxcompile.analysis.tune.tuned import without_idle
from mxcompile.errors import OptionError, not_allowed
from mxcompile.formats import KEPT, PRECISIONS, Choices, is_quantized
from mxcompile.policy import Gemm, Layer, Match, Policy, Rule, Use
from mxcompile.policy.model import Preset
from mxcompile.policy.patterns import literal
from mxcompile.policy.presets import PRESETS
from mxcompile.report import GemmRecord, Report
from mxcompile.rules import layers_of

_ALL = tuple(map(str, Gemm))
_NOTHING = Use(fprop=KEPT, dgrad=KEPT, wgrad=KEPT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """word: what it is called. use: what a rule for it says."""

    word: str
    use: Use

    @classmethod
    def of(cls, word: str, under: Choices) -> Candidate:
        """The precision or preset `word`, whatever the preset with formats `under` leaves open.

        Raises `OptionError` for a word that is neither.
        """
        if word in PRESETS and PRESETS[word].gemms:
            return cls(word=word, use=_use(PRESETS[word], under))
        if word in PRECISIONS and PRECISIONS[word].quantizes:
            return cls(word=word, use=_use(Preset(name=word, precision=PRECISIONS[word]), under))
        words = [name for name, row in PRECISIONS.items() if row.quantizes]
        presets = [name for name, preset in PRESETS.items() if preset.gemms]
        raise OptionError(not_allowed("precision or preset", word, [*words, *presets]))

    def without(self, gemms: Iterable[str]) -> Use:
        """What a rule says that keeps `gemms` in BF16."""
        kept: dict[str, Any] = dict.fromkeys(gemms, KEPT)
        left = [gemm for gemm in Gemm if gemm not in kept and self.use.wants(gemm) != KEPT]
        return dataclasses.replace(self.use, **kept) if left else _NOTHING


def _use(preset: Preset, under: Choices) -> Use:
    """What `preset` says of a layer, in full where `under` would fill in something else."""
    row, choices = preset.precision, preset.formats
    said: dict[str, Any] = {
        "elem_dtype": choices.elem or (row.elems[0] if under.elem else None),
        "grad_dtype": choices.grad_elem or (row.elems[0] if under.grad_elem else None),
        "rounding": choices.rounding or (row.formats(Choices()).x.rounding if under.rounding else None),
        row.tiles_key: (choices.tiles or (tuple(row.tiles) if under.tiles else (None,)))[0],
    }
    said = {key: value for key, value in said.items() if key in row.keys and value}
    said |= {str(gemm): row if gemm in preset.gemms else KEPT for gemm in Gemm}
    return Use(**said)


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A candidate for a layer, by its index, -1 for BF16. kept: the GEMMs that are in BF16."""

    candidate: int
    kept: tuple[str, ...]


BF16 = Option(candidate=-1, kept=_ALL)

Mix = Mapping[str, Option]
"""What each layer gets, by name."""

Cost = tuple[float, float]
"""Estimated µs, bytes of operands."""


class Costs:
    """What options cost, from what the candidates' passes did: one report each, of the same GEMMs."""

    def __init__(self, reports: Sequence[Report], target: str) -> None:
        self._of: dict[tuple[str, int, str], Cost] = {}
        self.estimated = False
        for index, report in enumerate(reports):
            aimed = dataclasses.replace(report.summary, target=target)
            found = estimate(dataclasses.replace(report, summary=aimed))
            self.estimated = found.summary.estimate_us is not None
            for gemm in found.gemms:
                quantized, bf16 = operand_bytes(gemm)
                self._add(gemm, index, gemm.estimate_us, quantized)
                if not index:
                    self._add(gemm, BF16.candidate, gemm.estimate_bf16_us, bf16)

    def _add(self, gemm: GemmRecord, candidate: int, us: float | None, num_bytes: float) -> None:
        key = gemm.name, candidate, gemm.gemm
        before = self._of.get(key, (0.0, 0.0))
        self._of[key] = before[0] + (us or 0.0), before[1] + num_bytes

    def __call__(self, layer: str, option: Option) -> Cost:
        """Of `layer` with `option`."""
        found = [
            self._of.get((layer, BF16.candidate if gemm in option.kept else option.candidate, gemm), (0, 0))
            for gemm in _ALL
        ]
        return round(sum(us for us, _ in found), 6), sum(size for _, size in found)

    def gemms(self, layer: str) -> frozenset[str]:
        """The kinds of GEMMs that `layer` has."""
        return frozenset(gemm for name, _, gemm in self._of if name == layer)


def mixed(policy: Policy, layers: Mapping[str, Layer], candidates: Sequence[Candidate], mix: Mix) -> Policy:
    """`policy` with a rule before its own for every option of `mix`, in the order of their first layers."""
    rules = tuple(
        Rule(
            match=Match(name=tuple(literal(name) for name, had in mix.items() if had == option)),
            use=_NOTHING if option == BF16 else candidates[option.candidate].without(option.kept),
        )
        for option in dict.fromkeys(mix.values())
    )
    return without_idle(policy, rules, layers, set(mix))


def quantized_layers(report: Report) -> dict[str, Layer]:
    """The layers of which `report` has a quantized GEMM, as rules see them."""
    names = {gemm.name for gemm in report.gemms if is_quantized(gemm.precision)}
    return {layer.name: layer for layer in layers_of(report.gemms) if layer.name in names}
