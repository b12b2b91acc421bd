"""Roofline estimates: the least time of a GEMM, quantized with its casts, and in the model's own dtype.

    own dtype       max(2mnk / rate of the dtype, d (mk + kn + mn) / bandwidth)
    native          max(2mnk / rate of the format, (b (mk + kn) + d mn) / bandwidth) + casts
    emulated        own dtype + casts

d is the size of an element of the own dtype: 2 bytes for BF16 at BF16's rate, 4 for FP32 at FP32's rate. b is
the size of a quantized element with its share of a scale: 33/32 bytes for MXFP8.

A cast writes b bytes per element (d if the GEMM is emulated and reads values) and reads half of the source,
because rowwise and columnwise quantize share one read. A per-tensor scale takes another read. Sibling layers
(q, k and v; gate and up) share the cast of their input. Not included: norms, activations, optimizer,
communication and launch overhead, which BF16 has, too. A cast that is fused with its prologue costs less.
These are estimates, never measurements.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from mxcompile.formats import BLOCK, AmaxKind, Format, Rounding, ScaleType, is_quantized
from mxcompile.lowering.chips.peak import Peak
from mxcompile.lowering.targets import TARGETS, Target
from mxcompile.report import STORED, GemmRecord, OperandFormat, Report

_QUANTIZED = 1 + 1 / BLOCK
_BF16 = 2.0
WIDE = {"float32": 4.0, "float64": 8.0}
"""Element sizes in bytes of the dtypes that do not multiply at BF16's rate."""


def estimate(report: Report) -> Report:
    """Returns `report` with an estimate in every record, or unchanged if its target has no known peaks."""
    target = TARGETS.get(report.summary.target)
    if target is None or target.peak is None:
        return report
    siblings = Counter(map(_siblings, report.gemms))
    gemms = tuple(
        dataclasses.replace(
            gemm,
            estimate_bf16_us=_own_us(gemm, target.peak),
            estimate_us=_us(gemm, target.peak, target, siblings[_siblings(gemm)]),
        )
        if gemm.is_known
        else gemm
        for gemm in report.gemms
    )
    summary = dataclasses.replace(
        report.summary,
        estimate_us=sum(gemm.estimate_us or 0.0 for gemm in gemms),
        estimate_bf16_us=sum(gemm.estimate_bf16_us or 0.0 for gemm in gemms),
    )
    return dataclasses.replace(report, gemms=gemms, summary=summary)


def _siblings(gemm: GemmRecord) -> tuple[object, ...]:
    """Returns a key shared by GEMMs that read the same input: layers with one role in one module."""
    parent = gemm.name.rpartition(".")[0]
    return gemm.graph, parent, gemm.role, gemm.gemm, gemm.batch, gemm.m if gemm.gemm != "dgrad" else gemm.name


def _own_us(gemm: GemmRecord, peak: Peak) -> float:
    tflops = peak.fp32_tflops if gemm.dtype in WIDE else peak.bf16_tflops
    return peak.time_us(flops=gemm.flops, tflops=tflops, num_bytes=_width(gemm) * sum(_elements(gemm)))


def _width(gemm: GemmRecord) -> float:
    """Returns the bytes of an element of the GEMM's own dtype."""
    return WIDE.get(gemm.dtype, _BF16)


def _us(gemm: GemmRecord, peak: Peak, target: Target, siblings: int) -> float:
    if not is_quantized(gemm.precision):
        return _own_us(gemm, peak)
    a, b, out = _elements(gemm)
    forms = [_format(fmt) for fmt in gemm.formats]
    tflops = _native_tflops(gemm, forms, peak, target)
    shares = [siblings if fmt.operand == "x" else 1 for fmt in gemm.formats]
    cast_bytes = product_bytes = 0.0
    width = _width(gemm)
    for numel, form, share, operand in zip((a, b), forms, shares, gemm.formats, strict=True):
        twice = form.of_tensor and form.amax.kind is not AmaxKind.DELAYED
        reads = width if twice else width / 2
        as_mx = tflops and tflops != peak.fp4_tflops and form.mx_elem
        held = _QUANTIZED if form.is_mx or as_mx else form.bytes_per_element
        if operand.rounding != STORED:
            cast_bytes += (reads + (held if tflops else width)) * numel / share
        elif not tflops:
            cast_bytes += (held + width) * numel  # a stored weight is dequantized
        product_bytes += held * numel
    product = (
        peak.time_us(flops=gemm.flops, tflops=tflops, num_bytes=product_bytes + width * out)
        if tflops
        else _own_us(gemm, peak)
    )
    return product + peak.time_us(flops=0, tflops=peak.bf16_tflops, num_bytes=cast_bytes)


def operand_bytes(gemm: GemmRecord) -> tuple[float, float]:
    """Returns the bytes of both operands of `gemm`, in their format and in BF16."""
    a, b, _ = _elements(gemm)
    if not is_quantized(gemm.precision):
        return _BF16 * (a + b), _BF16 * (a + b)
    held = (_format(fmt).bytes_per_element for fmt in gemm.formats)
    return sum(size * numel for size, numel in zip(held, (a, b), strict=True)), _BF16 * (a + b)


def _format(operand: OperandFormat) -> Format:
    """Returns the format of an operand. A stored weight has no rounding, which does not matter here."""
    derivation = Rounding.RCEIL if operand.rounding == STORED else operand.rounding
    return Format.of(f"{operand.elem} {operand.block} {derivation} {operand.elements} {operand.amax}")


def _native_tflops(gemm: GemmRecord, forms: list[Format], peak: Peak, target: Target) -> float:
    """Returns the rate of a product of these formats if the chip supports it natively, else 0."""
    if target.multiplies_fp4(*forms):
        return peak.fp4_tflops
    if target.multiplies_mx(*forms):
        return peak.mxfp8_tflops
    if any(form.scale is not ScaleType.FP32 for form in forms):
        return 0.0
    left, right = (str(form.tile) for form in forms)
    return peak.fp8_tflops if target.multiplies_fp8(left, right) else 0.0


def _elements(gemm: GemmRecord) -> tuple[int, int, int]:
    """Returns the number of elements of both operands and the result."""
    batch, m, n, k = (size or 0 for size in (gemm.batch, gemm.m, gemm.n, gemm.k))
    return batch * m * k, batch * k * n, batch * m * n
