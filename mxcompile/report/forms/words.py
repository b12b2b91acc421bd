"""Texts for numbers, sizes and formats, common to all forms of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mxcompile.formats import is_quantized
from mxcompile.policy import Role
from mxcompile.report.data.fold import grouped
from mxcompile.report.data.record import STORED, GemmRecord, OperandFormat


def _scaled(value: float, step: int, units: Sequence[str]) -> tuple[float, str]:
    """Returns `value` in the first of `units` in which it is below `step`, the ratio of consecutive units."""
    for unit in units[:-1]:
        if value < step:
            return value, unit
        value /= step
    return value, units[-1]


def byte_count(number: int) -> str:
    """Returns a number of bytes as text: ``1.5 KiB``."""
    value, unit = _scaled(number, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def count(number: int, noun: str) -> str:
    """Returns number and noun as text: ``1 graph``, ``2 graphs``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(names: Sequence[str], most: int) -> str:
    """Returns the first `most` of `names` as text, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def _decimal(value: float, *units: str) -> str:
    value, unit = _scaled(value, 1000, units)
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def duration(us: float) -> str:
    """Returns a time in µs as text: ``12.3 ms``."""
    return _decimal(us, "µs", "ms", "s")


UNITS: dict[str, Callable[[Any], str]] = {
    "bytes": byte_count,
    "count": "{:,}".format,
    "µs": duration,
}
"""Functions that write a figure as text, by its unit."""


def size(gemm: GemmRecord) -> str:
    """Returns the sizes as text: ``64×96×32``; a batch of 8 is ``8·64×96×32``, an unknown size is ``?``."""
    batch, *sizes = (length(value) for value in (gemm.batch, gemm.m, gemm.n, gemm.k))
    return ("" if batch == "1" else f"{batch}·") + "×".join(sizes)


def length(value: int | None) -> str:
    """Returns a size as text, ``?`` if it is None."""
    return "?" if value is None else str(value)


_DTYPES = {"float64": "FP64", "float32": "FP32", "float16": "FP16"}


def dtype_label(dtype: str) -> str:
    """Returns the display name of torch's `dtype`, BF16 if unknown."""
    return _DTYPES.get(dtype, "BF16")


def main_dtype(gemms: Iterable[GemmRecord]) -> str:
    """Returns the display name of the dtype with most FLOPs of `gemms`: the dtype of unquantized GEMMs."""
    flops: Counter[str] = Counter()
    for gemm in gemms:
        flops[dtype_label(gemm.dtype)] += gemm.flops
    return max(flops, key=flops.__getitem__, default="BF16")


def is_stored(gemm: GemmRecord) -> bool:
    """Whether the weight of `gemm` is an input of the graph that is stored quantized."""
    return any(form.operand == "w" and form.rounding == STORED for form in gemm.formats)


def precision_word(gemm: GemmRecord) -> str:
    """Returns the precision of `gemm`, or its dtype if it is not quantized."""
    return gemm.precision if is_quantized(gemm.precision) else dtype_label(gemm.dtype).lower()


def formats(operands: Sequence[OperandFormat]) -> str:
    """Returns the formats as text, with equal formats grouped: ``x, w: e4m3 1x32 rceil``."""
    by_format = grouped(operands, lambda form: form.format)
    return "; ".join(f"{', '.join(f.operand for f in same)}: {form}" for form, same in by_format.items())


def flop_count(number: float) -> str:
    """Returns a number of FLOPs as text: ``1.5 TFLOP``."""
    return _decimal(number, "FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")


_PER_TOKEN = frozenset(role for role in Role if role.row.per_token)


def tokens_of(gemms: Iterable[GemmRecord]) -> int:
    """Returns the number of tokens (rows) in most of the linear layers, by FLOPs; 0 without layers."""
    rows: Counter[int] = Counter()
    for gemm in gemms:
        if gemm.gemm == "fprop" and gemm.role in _PER_TOKEN and gemm.flops and (gemm.n, gemm.k) != (1, 1):
            rows[(gemm.batch or 0) * (gemm.m or 0)] += gemm.flops
    return max(rows, key=rows.__getitem__, default=0)


def speedup(gemms: Sequence[GemmRecord]) -> float | None:
    """Returns the estimated BF16 time of `gemms` ÷ their time under the policy; None without estimates."""
    ours = sum(gemm.estimate_us or 0.0 for gemm in gemms)
    bf16 = sum(gemm.estimate_bf16_us or 0.0 for gemm in gemms)
    return bf16 / ours if ours and bf16 else None


def tone(precision: str) -> str:
    """Returns the CSS class of a precision; "" for none."""
    return "quantized" if precision and is_quantized(precision) else precision
