"""Warnings for models that are estimated slower quantized than in BF16, with the cause and a remedy.

The cost of a cast grows with the elements it reads and the gain of a GEMM with its arithmetic, so few tokens
and narrow layers lose. If the chip has no GEMM for the format, casts come in addition to the BF16 GEMMs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from mxcompile.analysis.explain.sweep import at_tokens
from mxcompile.formats import Operands, is_quantized, labels
from mxcompile.lowering.targets import TARGETS
from mxcompile.offline.record_work import estimate, is_emulated
from mxcompile.policy.presets import PRESETS
from mxcompile.report import GemmRecord, Report
from mxcompile.report.data.fold import fold
from mxcompile.report.forms.text import slower
from mxcompile.report.forms.words import listed, main_dtype, tokens_of

_MANY = 1 << 20
"""Number of tokens above which speedups no longer change."""
_NAMED = 3


def advised(report: Report) -> Report:
    """Returns `report`, which has estimates, with warnings if it is FP32 or slower than unquantized."""
    summary = report.summary
    if not summary.estimate_us or not summary.estimate_bf16_us:
        return report
    advice = [*_of_fp32(report), *_slower(report)]
    return dataclasses.replace(
        report, summary=dataclasses.replace(summary, warnings=(*summary.warnings, *advice))
    )


def _of_fp32(report: Report) -> Iterator[str]:
    """Yields a warning if the model is FP32, which is unusual for training on a GPU."""
    peak = TARGETS[report.summary.target].peak
    if main_dtype(report.gemms) == "FP32" and peak is not None:
        yield (
            f"this model is FP32: its products are estimated at the {peak.tflops('fp32'):g} TFLOP/s of FP32,"
            f" where BF16 has {peak.tflops('bf16'):g}; to estimate in BF16, use model.to(torch.bfloat16),"
            " autocast or --dtype bf16"
        )


def _slower(report: Report) -> Iterator[str]:
    if _ratio(report) < 1:
        words = labels(gemm.precision for gemm in report.gemms)
        yield (
            f"{report.summary.target} is estimated slower with {words} than in {main_dtype(report.gemms)}"
            f" ({_ratio(report):.2f}×): {_help(report)}"
        )


def _help(report: Report) -> str:
    tokens = tokens_of(report.gemms)
    many = at_tokens(report, _MANY) if tokens else report
    if _ratio(many) < 1:
        return "; ".join([_why_never(report), *_width_advice(many)])
    enough = tokens
    while enough < _MANY and _ratio(at_tokens(report, enough)) < 1:
        enough *= 2
    return (
        f"{tokens:,} tokens are few; with about {enough:,} (a larger batch, longer sequences) it is as fast"
    )


def _why_never(report: Report) -> str:
    emulated = _emulated(report)
    if not emulated:
        return "casts cost more than products gain, at any number of tokens"
    words, model_dtype = labels(gemm.precision for gemm in emulated), main_dtype(report.gemms)
    return f"the chip multiplies {words} in {model_dtype}, and casts come on top{_with_fp8(report)}"


def _emulated(report: Report) -> list[GemmRecord]:
    """Returns the GEMMs that the chip of `report` multiplies dequantized."""
    return [gemm for gemm in report.gemms if is_emulated(gemm, TARGETS[report.summary.target])]


def _with_fp8(report: Report) -> str:
    """Returns a hint at the policy for the chip's FP8 GEMM if it is estimated to be faster; "" otherwise."""
    if not TARGETS[report.summary.target].fp8_tiles:
        return ""
    fp8 = PRESETS["fp8_rowwise"].precision.formats(PRESETS["fp8_rowwise"].formats)
    ratio = _ratio(estimate(dataclasses.replace(report, gemms=tuple(_cast_to(g, fp8) for g in report.gemms))))
    if ratio <= 1:
        return ""
    return f" (the policy fp8_rowwise, on the chip's own FP8 GEMM, is estimated at {ratio:.2f}×)"


def _cast_to(gemm: GemmRecord, formats: Operands) -> GemmRecord:
    """Returns `gemm` with its operands in `formats` if it is quantized."""
    if not is_quantized(gemm.precision):
        return gemm
    changed = []
    for form in gemm.formats:
        fmt = formats.operand_format(form.operand)
        words = {"elem": fmt.elem.name, "block": str(fmt.tile), "rounding": fmt.derivation}
        words |= {"transform": fmt.transform, "scales": fmt.scales}
        changed.append(dataclasses.replace(form, **words))
    return dataclasses.replace(gemm, formats=tuple(changed))


def _width_advice(many: Report) -> Iterator[str]:
    """Yields advice on the layers that are slower even with many tokens."""
    names = [row.name or "(root)" for row, _ in slower(fold(many.gemms))]
    if names and not _emulated(many):
        yield f"narrow layers, which a rule can leave in BF16: {listed(names, _NAMED)}"


def _ratio(report: Report) -> float:
    summary = report.summary
    return (summary.estimate_bf16_us or 1.0) / (summary.estimate_us or 1.0)
