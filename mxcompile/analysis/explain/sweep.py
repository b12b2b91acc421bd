"""`sweep`: the estimates of one report at other numbers of tokens, to find where quantization begins to pay.

The model is not traced again. More tokens mean more sequences, so linear layers have more rows (m of fprop
and dgrad, k of wgrad) and attention products a larger batch. The policy's decisions for the tokens of the
report stay, even if a rule has `min_m` or `max_m`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mxcompile.errors import OptionError
from mxcompile.formats import labels
from mxcompile.offline.record_work import estimate
from mxcompile.policy import ATTENTION_PRODUCTS
from mxcompile.report import Report
from mxcompile.report.forms import plots
from mxcompile.report.forms.tables import drawn
from mxcompile.report.forms.words import duration, tokens_of

TOKENS = (16, 64, 256, 1024, 4096, 16384, 65536)
"""Default numbers of tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Estimates at a number of tokens, in µs: all matmuls and casts under the policy, and in BF16."""

    tokens: int
    estimate_us: float
    estimate_bf16_us: float

    @property
    def speedup(self) -> float:
        """Time in BF16 ÷ time under the policy."""
        return self.estimate_bf16_us / self.estimate_us


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """One model on one target at several numbers of tokens. words: names of the precisions, for texts."""

    points: tuple[Point, ...]
    target: str
    policy: str
    words: str

    def __str__(self) -> str:
        rows = [
            [f"{p.tokens:,}", duration(p.estimate_us), duration(p.estimate_bf16_us), f"{p.speedup:.2f}×"]
            for p in self.points
        ]
        table = drawn([["tokens", self.words, "BF16", f"BF16 ÷ {self.words}"], *rows])
        return f"{self._title()}\nestimates, not measured\n\n{table}\n\n{self._verdict()}"

    def _title(self) -> str:
        return f"target {self.target}, policy {self.policy}: matmuls and casts by tokens"

    def _verdict(self) -> str:
        slow = [point.tokens for point in self.points if point.speedup < 1]
        if not slow:
            return f"{self.words} is estimated no slower than BF16 at each number of tokens"
        if len(slow) == len(self.points):
            return f"{self.words} is estimated slower than BF16 at each number of tokens"
        faster = ", ".join(f"{point.tokens:,}" for point in self.points if point.speedup >= 1)
        return f"{self.words} is estimated no slower than BF16 at {faster} tokens"

    def plot(self, path: str | Path) -> None:
        """Draws both times and their ratio over the tokens. Raises `OptionError` without matplotlib."""
        figure = plots.figure(figsize=(9, 3.8))
        times, gains = figure.subplots(1, 2)
        tokens = [point.tokens for point in self.points]
        times.plot(tokens, [p.estimate_bf16_us for p in self.points], "s--", color="#8a8f98", label="BF16")
        times.plot(tokens, [p.estimate_us for p in self.points], "o-", color="#2a6f97", label=self.words)
        times.set(xscale="log", yscale="log", xlabel="tokens", ylabel="µs", title="matmuls and casts")
        times.legend()
        gains.axhline(1, color="#8a8f98", linestyle="--")
        gains.plot(tokens, [p.speedup for p in self.points], "o-", color="#2a6f97")
        gains.set(xscale="log", xlabel="tokens", title=f"BF16's time ÷ {self.words}'s: above 1 is faster")
        for axes in (times, gains):
            axes.grid(alpha=0.3)
        figure.suptitle(f"{self._title()} (estimates, not measured)", fontsize=10)
        figure.savefig(path)


def sweep(report: Report, tokens: Sequence[int] = TOKENS) -> Sweep:
    """Returns estimates of `report`, a result of `explain`, at each of `tokens`.

    Raises `OptionError` for a target without known peaks, and for a model without linear layers on tokens.
    """
    summary = report.summary
    if not summary.estimate_us:
        raise OptionError(
            f"target {summary.target} has no data sheet to estimate from: name a chip as `target`, such as"
            " b200"
        )
    if not tokens_of(report.gemms):
        raise OptionError("a sweep over tokens needs linear layers that read tokens, and this model has none")
    summaries = [(token, at_tokens(report, token).summary) for token in tokens]
    return Sweep(
        points=tuple(
            Point(tokens=n, estimate_us=s.estimate_us or 0.0, estimate_bf16_us=s.estimate_bf16_us or 0.0)
            for n, s in summaries
        ),
        target=summary.target,
        policy=summary.policy,
        words=labels(gemm.precision for gemm in report.gemms),
    )


def at_tokens(report: Report, tokens: int) -> Report:
    """Returns `report` with estimates for `tokens` tokens, as more or fewer sequences of the same length."""
    factor = tokens / tokens_of(report.gemms)
    gemms = []
    for gemm in report.gemms:
        size = "batch" if gemm.role in ATTENTION_PRODUCTS else "k" if gemm.gemm == "wgrad" else "m"
        gemms.append(dataclasses.replace(gemm, **{size: max(1, round(getattr(gemm, size) * factor))}))
    return estimate(dataclasses.replace(report, gemms=tuple(gemms)))
