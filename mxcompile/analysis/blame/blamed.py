"""The result of a blame: layers with their effects, and a policy that excludes the worst of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mxcompile.analysis.blame.effects import MEASURES, Effect, Spread, exceeds, falls_short, together
from mxcompile.analysis.study.policy_file import MeasuredPolicy
from mxcompile.report.data.fold import spelled
from mxcompile.report.forms.tables import Table
from mxcompile.report.forms.words import count


@dataclass(frozen=True, kw_only=True, slots=True)
class BlamedPart:
    """A layer or a group of neighbouring layers, and the GEMMs that were quantized or left out together.

    layers: paths. gemms: "fprop", "dgrad", "wgrad". alone: effect if only these are quantized. left_out:
    effect if all others are quantized. An effect is None if it was not measured.
    """

    layers: tuple[str, ...]
    gemms: tuple[str, ...]
    alone: Effect | None = None
    left_out: Effect | None = None


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The result of a search.

    whole: effect of all differing GEMMs. kinds: all GEMMs of one kind. parts: layers or groups, the worst
    first; together they are all layers that differ. gemms: single GEMMs of the worst parts. worst: (layer,
    GEMM) pairs to exclude. left: effect of all other GEMMs.
    """

    whole: Effect
    left: Effect
    parts: tuple[BlamedPart, ...] = ()
    kinds: tuple[BlamedPart, ...] = ()
    gemms: tuple[BlamedPart, ...] = ()
    worst: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Blamed(MeasuredPolicy, Findings):
    """The result of `blame`. Its policy is the examined policy, with `worst` as in the reference.

    `asked`, against: names of the examined and the reference policy. measure: measure of the search. remove:
    requested share of the effect to remove.

    num_layers, num_gemms: numbers of differing layers and GEMMs. runs: runs of the model. max_runs: announced
    limit. repeats: repeats of each effect. flop_share_before, flop_share: quantized share of the matmul FLOPs
    under the examined policy and under `policy`.
    """

    asked: str
    against: str
    measure: str
    remove: float
    num_layers: int
    num_gemms: int
    runs: int
    max_runs: int
    repeats: int
    flop_share_before: float
    flop_share: float

    def _facts(self) -> list[str]:
        repeated = f" of {count(self.repeats, 'repeat')} each" if self.repeats > 1 else ""
        facts = [
            f"blame: effect of {self.asked} against {self.against} on the {self.measure}:"
            f" {count(self.num_layers, 'layer')}, {count(self.num_gemms, 'GEMM')};"
            f" {count(self.runs, 'run')} of the model, at most {self.max_runs} planned{repeated}"
        ]
        if not self.parts:
            return facts
        words = [f"{name} {spread}" for name in MEASURES if (spread := getattr(self.whole, name)) is not None]
        facts.append(f"all together: {', '.join(words)}")
        if len(self.parts) > 1 and self._sum is not None:
            how = "with their signs" if self.measure == "loss" else "as independent errors, in squares"
            facts.append(f"one by one, added up {how}: {Spread(mean=self._sum)}")
        facts += [*self._interplay(), *self._policy()]
        if self.repeats > 1:
            facts.append(
                f"± is the standard error of the mean of {self.repeats} repeats; each repeat and its"
                " reference draw the same new random numbers"
            )
        return facts

    def _policy(self) -> Iterator[str]:
        whole, remaining = self.whole.on(self.measure), self.left.on(self.measure)
        names = list(dict.fromkeys(name for name, _ in self.worst))
        alone = f"{count(len(self.worst), 'GEMM')} of {count(len(names), 'layer')} as in {self.against}"
        yield (
            f"the policy: {alone} leave {remaining} of {whole}, and"
            f" {self.flop_share:.1%} of the matmul FLOPs quantized, {self.flop_share_before:.1%} before"
        )
        if self.num_layers > 3 and 2 * len(names) > self.num_layers:
            yield (
                f"the difference is spread over many layers: {len(names)} of {self.num_layers} must change to"
                f" remove {self.remove:.0%} of it"
            )

    @property
    def _sum(self) -> float | None:
        """Sum of the effects of the parts that were measured alone; None if none was."""
        alone = [part.alone for part in self.parts if part.alone is not None]
        return together(self.measure, alone) if alone else None

    def _interplay(self) -> Iterator[str]:
        """Yields a sentence if the effects of the parts do not add up to the whole."""
        whole, parts = self.whole.on(self.measure), self._sum
        if len(self.parts) < 2 or parts is None:
            return
        start = "THE SUM OF THE PARTS IS NOT THE WHOLE: together they do"
        sizes = f"{Spread(mean=whole.size)} instead of {Spread(mean=parts)}"
        if exceeds(whole, parts):
            yield f"{start} more, {sizes}; the column 'without' shows the rest without a layer"
        elif falls_short(whole, parts):
            yield f"{start} less, {sizes}: effects of some layers cancel or hide others"

    def _table(self) -> Table:
        """Returns headers, then rows for all GEMMs, each kind of GEMM, and the parts with their GEMMs."""
        measures = [self.measure, *(measure for measure in MEASURES if measure != self.measure)]
        measures = [measure for measure in measures if getattr(self.whole, measure) is not None]
        left_out = any(part.left_out for part in self.parts)
        everything = BlamedPart(layers=(), gemms=("all",), alone=self.whole)
        of_layers: dict[tuple[str, ...], list[BlamedPart]] = {}
        for part in self.gemms:
            of_layers.setdefault(part.layers, []).append(part)
        rows = [("(all)", everything), *(("(all)", kind) for kind in self.kinds)]
        for part in self.parts:
            name = spelled(part.layers) or "(root)"
            rows += [(name, row) for row in (part, *of_layers.get(part.layers, ()))]
        headers = ["layer", "GEMMs", "of all", *measures, *(["without"] if left_out else [])]
        rows = rows if self.parts else []
        return [headers, *(self._row(name, part, measures, left_out) for name, part in rows)]

    def _row(self, name: str, part: BlamedPart, measures: list[str], left_out: bool) -> list[str]:
        whole = self.whole.on(self.measure).size
        size = None if part.alone is None else part.alone.on(self.measure).size
        share = "" if size is None or whole in (0.0, float("inf")) else f"{size / whole:.0%}"
        cells = ["" if part.alone is None else str(part.alone.on(measure)) for measure in measures]
        rest = [] if not left_out else ["" if part.left_out is None else str(part.left_out.on(self.measure))]
        return [name, ", ".join(part.gemms), share, *cells, *rest]
