"""What tuning gives: a policy with a measured reason for every exception, and its audit."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mxcompile.analysis.audit import Audit
from mxcompile.analysis.audit.text import decibels
from mxcompile.analysis.tune.bounds import Bounds
from mxcompile.formats import KEPT, is_quantized
from mxcompile.policy import Gemm, Layer, Match, Policy, Rule, Use
from mxcompile.policy.patterns import literal
from mxcompile.report import Report
from mxcompile.report.files import save
from mxcompile.report.forms.tables import drawn, fitted, wrapped
from mxcompile.rules import layers_of

_WIDTH = 110


@dataclass(frozen=True, kw_only=True, slots=True)
class Exempt:
    """A layer that has to stay in BF16, in part.

    name: its path. gemms: those of "fprop", "dgrad" and "wgrad" that do. reason: what was measured.
    flop_share: of these GEMMs, of all matmul FLOPs of the model, 0 to 1.
    """

    name: str
    gemms: tuple[str, ...]
    reason: str
    flop_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """What a layer got of a mix.

    name: its path. use: word of the precision or preset, "bf16" for none. kept: its GEMMs in BF16 for all
    that. sqnr_db: the lowest of its GEMMs, None if none is quantized. estimate_us, estimate_bf16_us: of its
    GEMMs and casts so and in BF16, None without a data sheet of the target. reason: why nothing cheaper.
    """

    name: str
    use: str
    kept: tuple[str, ...]
    sqnr_db: float | None
    estimate_us: float | None
    estimate_bf16_us: float | None
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """The result of `tune`.

    policy: an ordinary one. bounds: what was asked for. exempt: the exceptions it makes from what tuning
    started with, in the order of the model. chosen: of a mix of precisions, what every layer got. comments:
    for the first rules of the policy, why they are there. audit: of the model under `policy`.
    flop_share_before: share of the matmul FLOPs that was quantized at the start;
    ``audit.report.summary.flop_share`` is what was kept. met: whether the audit is within the bounds and
    quantizes anything, or could and BF16 is estimated to be faster. notes: what a reader should know. target:
    that costs were estimated for, "" if none was.
    """

    policy: Policy
    bounds: Bounds
    exempt: tuple[Exempt, ...] = ()
    chosen: tuple[Chosen, ...] = ()
    comments: tuple[str, ...] = ()
    audit: Audit
    flop_share_before: float
    met: bool
    notes: tuple[str, ...] = ()
    target: str = ""

    def __str__(self) -> str:
        lines = wrapped(self._facts())
        if self.exempt:
            table = [["layer", "in BF16", "FLOPs", "measured"]]
            table += [
                [e.name, ", ".join(e.gemms), f"{e.flop_share:.1%}", textwrap.fill(e.reason, 50)]
                for e in self.exempt
            ]
            lines += ["", drawn(fitted(table, ("layer",)))]
        if self.chosen:
            rows = [["layer", "in", "but in BF16", "dB", "of BF16's time", "nothing cheaper because"]]
            rows += map(_row, self.chosen)
            lines += ["", drawn(fitted(rows, ("layer",)))]
        return "\n".join(lines)

    def _facts(self) -> list[str]:
        kept = self.audit.report.summary.flop_share
        lowest = self.audit.numerics.lowest_sqnr_db
        reached = ["nothing is left quantized"]
        if self.met and lowest is None:
            reached = [f"everything in BF16, which is estimated to be fastest on {self.target}"]
        if lowest is not None:
            reached = [f"lowest SQNR of a GEMM {decibels(lowest)} dB"]
        if (gap := self.audit.numerics.loss_gap) is not None:
            reached.append(f"loss gap {gap:+.4%}")
        return [
            f"bound: {self.bounds}: {'met' if self.met else 'CANNOT BE MET'}",
            f"reached: {', '.join(reached)}",
            f"kept quantized: {kept:.1%} of matmul FLOPs, {self.flop_share_before:.1%} before",
            *self._estimated(),
            *(f"note: {note}" for note in self.notes),
        ]

    def _estimated(self) -> list[str]:
        """What the layers of a mix would take, if that is known."""
        if not self.chosen:
            return []
        if not self.target:
            return ["chosen by bytes of operands: no target with a data sheet was named"]
        us, bf16 = (
            sum(each or 0.0 for each in times)
            for times in zip(*((c.estimate_us, c.estimate_bf16_us) for c in self.chosen), strict=True)
        )
        return [f"estimated on {self.target}: {us / bf16:.2f} of BF16's time of these layers"]

    def to_yaml(self) -> str:
        """The policy as a file, with the reasons as comments; `Policy.load` reads it back."""
        plain = self.policy.to_dict()
        rules = plain.pop("rules")
        written = [_comment(f"Tuned by measurement; {fact}") for fact in self._facts()[:1]]
        written += [_comment(fact) for fact in self._facts()[1:]]
        written.append(_dumped(plain))
        if not rules:
            return "".join(written)
        written.append("rules:\n")
        for index, rule in enumerate(rules):
            lines = _dumped([rule])
            if index < len(self.comments):
                lines = _comment(self.comments[index]) + lines
            written.append(textwrap.indent(lines, "  "))
        return "".join(written)

    def dump(self, path: str | Path) -> None:
        """Write `to_yaml` to `path`, whole or not at all. Raises `OptionError` if it cannot be written."""
        save(path, self.to_yaml(), "policy")


def exempting(policy: Policy, report: Report, exempt: Sequence[Exempt]) -> Policy:
    """`policy` with rules before its own that keep `exempt` in BF16; `report` is what it does without them.

    Its rules that then decide for no layer of the model any more are left out.
    """
    layers = {layer.name: layer for layer in layers_of(report.gemms)}
    rules = tuple(_rule(policy, layers[e.name], _left(report, e)) for e in exempt)
    return without_idle(policy, rules, layers, {e.name for e in exempt})


def without_idle(
    policy: Policy, rules: tuple[Rule, ...], layers: Mapping[str, Layer], taken: Container[str]
) -> Policy:
    """`policy` with `rules`, which decide for the layers `taken`, before its own that still decide."""
    others = [layer for name, layer in layers.items() if name not in taken]
    idle = _deciding(policy, layers.values()) - _deciding(policy, others)
    kept = tuple(rule for index, rule in enumerate(policy.rules) if index not in idle)
    return dataclasses.replace(policy, rules=rules + kept, label="tuned policy")


def _row(chosen: Chosen) -> list[str]:
    us, bf16 = chosen.estimate_us, chosen.estimate_bf16_us
    return [
        chosen.name or "(root)",
        chosen.use,
        ", ".join(chosen.kept),
        "" if chosen.sqnr_db is None else decibels(chosen.sqnr_db),
        f"{us / bf16:.2f}" if us and bf16 else "",
        textwrap.fill(chosen.reason, 40),
    ]


def _deciding(policy: Policy, layers: Iterable[Layer]) -> set[int | None]:
    return {policy.rule_for(layer) for layer in layers}


def _left(report: Report, exempt: Exempt) -> frozenset[str]:
    """The GEMMs of the layer that stay in MXFP8, and which do not: everything if none stays."""
    found = {g.gemm for g in report.gemms if g.name == exempt.name and is_quantized(g.precision)}
    return frozenset(exempt.gemms) if found - set(exempt.gemms) else frozenset(map(str, Gemm))


def _rule(policy: Policy, layer: Layer, gemms: frozenset[str]) -> Rule:
    """The rule that keeps `gemms` of `layer` in BF16, and the rest of it as `policy` has it."""
    match = Match(name=(literal(layer.name),))
    if len(gemms) == len(Gemm):
        return Rule(match=match, use=Use(fprop=KEPT, dgrad=KEPT, wgrad=KEPT))
    index = policy.rule_for(layer)
    use = Use() if index is None else policy.rules[index].use
    left: dict[str, Any] = dict.fromkeys(gemms, KEPT)
    return Rule(match=match, use=dataclasses.replace(use, **left))


def _dumped(data: Any) -> str:
    text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=_WIDTH)
    return text


def _comment(text: str) -> str:
    return "".join(f"# {line}\n" for line in textwrap.wrap(text, _WIDTH, break_on_hyphens=False))
