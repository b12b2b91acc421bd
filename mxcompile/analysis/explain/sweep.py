"""`sweep`: the estimates of one report at other numbers of tokens, to find where quantization begins to pay.

The model is not traced again. More tokens mean more sequences, so linear layers have more rows (m of fprop
and dgrad, k of wgrad) and attention products a larger batch. The policy's decisions for the tokens of the
report stay, even if a rule has `min_m` or `max_m`.

`advised` warns about a model that is estimated slower quantized than in BF16, with the cause and a remedy.
The cost of a cast grows with the elements it reads and the gain of a GEMM with its arithmetic, so few tokens
and narrow layers lose. If the chip has no GEMM for the format, casts come in addition to the BF16 GEMMs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mxcompile.errors import OptionError
from mxcompile.formats import is_quantized, labels
from mxcompile.lowering.targets import TARGETS
from mxcompile.offline.record_work import estimate, is_emulated
from mxcompile.policy import ATTENTION_PRODUCTS
from mxcompile.policy.presets import PRESETS
from mxcompile.report import Report
from mxcompile.report.data.fold import fold
from mxcompile.report.forms import plots
from mxcompile.report.forms.tables import drawn
from mxcompile.report.forms.text import slower
from mxcompile.report.forms.words import duration, listed, main_dtype, tokens_of

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
        faster = [f"{point.tokens:,}" for point in self.points if point.speedup >= 1]
        where = f"{', '.join(faster)} tokens"
        if not faster or len(faster) == len(self.points):
            where = "each number of tokens"
        speed = "slower" if self.points and not faster else "no slower"
        verdict = f"{self.words} is estimated {speed} than BF16 at {where}"
        return f"{self._title()}\nestimates, not measured\n\n{table}\n\n{verdict}"

    def _title(self) -> str:
        return f"target {self.target}, policy {self.policy}: matmuls and casts by tokens"

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


_MANY = 1 << 20
"""Number of tokens above which speedups no longer change."""
_NAMED = 3


def advised(report: Report) -> Report:
    """Returns `report`, which has estimates, with warnings if it is FP32 or slower than unquantized."""
    summary, advice = report.summary, []
    if not summary.estimate_us or not summary.estimate_bf16_us:
        return report
    model_dtype, peak = main_dtype(report.gemms), TARGETS[summary.target].peak
    if model_dtype == "FP32" and peak is not None:  # unusual for training on a GPU
        advice.append(
            f"this model is FP32: its products are estimated at the {peak.tflops('fp32'):g} TFLOP/s of FP32,"
            f" where BF16 has {peak.tflops('bf16'):g}; to estimate in BF16, use model.to(torch.bfloat16),"
            " autocast or --dtype bf16"
        )
    if _ratio(report) < 1:
        words = labels(gemm.precision for gemm in report.gemms)
        advice.append(
            f"{summary.target} is estimated slower with {words} than in {model_dtype}"
            f" ({_ratio(report):.2f}×): {_help(report)}"
        )
    return dataclasses.replace(
        report, summary=dataclasses.replace(summary, warnings=(*summary.warnings, *advice))
    )


def _help(report: Report) -> str:
    tokens, target = tokens_of(report.gemms), TARGETS[report.summary.target]
    many = at_tokens(report, _MANY) if tokens else report
    if _ratio(many) >= 1:
        enough = tokens
        while enough < _MANY and _ratio(at_tokens(report, enough)) < 1:
            enough *= 2
        return (
            f"{tokens:,} tokens are few; with about {enough:,} (a larger batch, longer sequences) it is as"
            " fast"
        )
    emulated = [gemm for gemm in report.gemms if is_emulated(gemm, target)]
    if emulated:
        words, model_dtype = labels(gemm.precision for gemm in emulated), main_dtype(report.gemms)
        advice = f"the chip multiplies {words} in {model_dtype}, and casts come on top"
        return f"{advice}{_with_fp8(report) if target.fp8_tiles else ''}"
    advice = "casts cost more than products gain, at any number of tokens"
    names = [row.name or "(root)" for row, _ in slower(fold(many.gemms))]
    narrow = f"; narrow layers, which a rule can leave in BF16: {listed(names, _NAMED)}"
    return f"{advice}{narrow if names else ''}"


def _with_fp8(report: Report) -> str:
    """Returns a hint at the policy for the chip's FP8 GEMM if it is estimated to be faster; "" otherwise."""
    fp8 = PRESETS["fp8_rowwise"].precision.formats(PRESETS["fp8_rowwise"].formats)
    gemms = []
    for gemm in report.gemms:
        forms = []
        for form in gemm.formats if is_quantized(gemm.precision) else ():
            fmt = fp8.operand_format(form.operand)
            words = {"elem": fmt.elem.name, "block": str(fmt.tile), "rounding": fmt.derivation}
            words |= {"transform": fmt.transform, "scales": fmt.scales}
            forms.append(dataclasses.replace(form, **words))
        gemms.append(dataclasses.replace(gemm, formats=tuple(forms) or gemm.formats))
    ratio = _ratio(estimate(dataclasses.replace(report, gemms=tuple(gemms))))
    if ratio <= 1:
        return ""
    return f" (the policy fp8_rowwise, on the chip's own FP8 GEMM, is estimated at {ratio:.2f}×)"


def _ratio(report: Report) -> float:
    summary = report.summary
    return (summary.estimate_bf16_us or 1.0) / (summary.estimate_us or 1.0)
