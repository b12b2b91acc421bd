"""An audit as text and Markdown: a summary, then GEMMs and cast tensors, the worst first.

Text is at most 120 columns wide: layer names that do not fit lose their middle. Markdown keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mxcompile.report import GemmNumerics, Numerics, TensorNumerics
from mxcompile.report.text import Table, bullets, drawn, escaped, fitted, wrapped

_GEMM_HEADERS = ["layer", "role", "GEMM", "m×n×k", "dB", "cosine", "MSE", "error"]
_TENSOR_HEADERS = ["layer", "cast", "dB", "cosine", "MSE", "error", "to 0", "cut", "2^"]
_GEMM_TITLE = "Outputs of GEMMs against FP32, worst first: SQNR in dB, relative error"
_TENSOR_TITLE = (
    "Casts, worst first: SQNR in dB, relative error, shares cast to zero and cut off, exponents of the scales"
)


def to_text(numerics: Numerics, rows: int | None = None) -> str:
    """`numerics` for a terminal; of each table at most `rows` rows."""
    lines = wrapped(_facts(numerics))
    for title, (headers, *found) in _tables(numerics):
        lines += ["", title, "", drawn(fitted([headers, *found[:rows]], ("layer",)), "simple")]
        if rows is not None and len(found) > rows:
            lines.append(f"… and {len(found) - rows} better ones")
    return "\n".join(lines)


def to_markdown(numerics: Numerics) -> str:
    """`numerics` for a pull request."""
    headline, *facts = _facts(numerics)
    parts = [f"### {headline}", *([bullets(facts)] if facts else [])]
    for title, table in _tables(numerics):
        parts += [title, drawn(escaped(table), "github")]
    return "\n\n".join(parts) + "\n"


def _facts(numerics: Numerics) -> list[str]:
    facts = [
        f"MXFP8 audit, policy {numerics.policy}: {len(numerics.gemms)} GEMMs,"
        f" {len(numerics.tensors)} cast tensors{'' if numerics.gradients else ', forward only'}"
    ]
    if numerics.loss is not None and numerics.loss_reference is not None and numerics.loss_gap is not None:
        facts.append(
            f"loss {numerics.loss:.6g}, in BF16 {numerics.loss_reference:.6g}: gap {numerics.loss_gap:+.4%}"
        )
    if numerics.logits_sqnr_db is not None and numerics.logits_cosine is not None:
        facts.append(
            f"main output against BF16: SQNR {decibels(numerics.logits_sqnr_db)} dB,"
            f" cosine {numerics.logits_cosine:.6f}"
        )
    return facts + [f"note: {' '.join(note.split())}" for note in numerics.notes]


def _tables(numerics: Numerics) -> list[tuple[str, Table]]:
    """Titles and tables, headers first."""
    tables: list[tuple[str, Table]] = []
    if numerics.gemms:
        tables.append((_GEMM_TITLE, [_GEMM_HEADERS, *map(_gemm, numerics.worst_gemms())]))
    if numerics.tensors:
        tables.append((_TENSOR_TITLE, [_TENSOR_HEADERS, *map(_tensor, numerics.worst_tensors())]))
    return tables


def _gemm(gemm: GemmNumerics) -> list[str]:
    size = f"{gemm.m}×{gemm.n}×{gemm.k}"
    return [
        _named(gemm.name, 0, gemm.calls),
        gemm.role,
        gemm.gemm,
        f"{gemm.batch}·{size}" if gemm.batch > 1 else size,
        decibels(gemm.sqnr_db),
        f"{gemm.cosine:.5f}",
        f"{gemm.mse:.1e}",
        _share(gemm.rel_error),
    ]


def _tensor(tensor: TensorNumerics) -> list[str]:
    square = "" if tensor.block == "1x32" else f" {tensor.block}"
    return [
        _named(tensor.name, len(tensor.shared_with), tensor.calls),
        f"{tensor.operand} {tensor.layout.removesuffix('wise')} {tensor.elem} {tensor.rounding}{square}",
        decibels(tensor.sqnr_db),
        f"{tensor.cosine:.5f}",
        f"{tensor.mse:.1e}",
        _share(tensor.rel_error),
        _share(tensor.underflow),
        _share(tensor.saturation),
        _range(tensor.scale_histogram),
    ]


def _named(name: str, others: int, calls: int) -> str:
    """The layer, how many others share its tensor, and how often it ran if more than once."""
    shared = f" +{others}" if others else ""
    return f"{name or '(root)'}{shared}{f' ({calls} calls)' if calls > 1 else ''}"


def decibels(value: float) -> str:
    """``28.31``; ``exact`` for no error at all, ``NaN`` for values that are not finite."""
    if math.isnan(value):
        return "NaN"
    return ("exact" if value > 0 else "-inf") if math.isinf(value) else f"{value:.2f}"


def _share(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.3%}" if value >= 1e-5 else f"{100 * value:.0e}%"


def _range(histogram: Sequence[tuple[int, int]]) -> str:
    """Exponents of the smallest and the largest scale; blocks of zeros, byte 0, and of NaN by name."""
    bytes_ = {byte for byte, _ in histogram}
    exponents = [byte - 127 for byte in bytes_ - {0, 255}]
    words = [f"{min(exponents)}…{max(exponents)}"] if exponents else []
    return ", ".join(words + [word for byte, word in ((0, "0"), (255, "NaN")) if byte in bytes_])
