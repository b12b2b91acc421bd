"""Estimates the times of the GEMMs in a report, each quantized with its casts and in the model's own dtype.

    own dtype       a product in BF16, or in FP32
    native          a product in the quantized formats, and casts
    emulated        a product in the own dtype, and casts

Products and casts are launches at the rates of `rates`, like the launches of `graph_work` and `kernel_work`.
A record has no graph, so its casts are assumed: one launch makes the rowwise and the columnwise copy of a
tensor and reads the tensor once, or twice if it first takes the amax of the whole tensor. Each GEMM of a
training step bears half of the launch. Sibling layers (q, k and v; gate and up) share the cast of their
input. Attention keeps its matrix of scores on the chip. Not included: norms, activations, optimizer and
communication, which BF16 has, too. A cast that is fused with its prologue costs less.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

from mxcompile.formats import BLOCK, AmaxKind, Format, Rounding, is_quantized
from mxcompile.lowering.choices.families import families
from mxcompile.lowering.targets import TARGETS, Target
from mxcompile.offline.device import attention_backend
from mxcompile.offline.estimate import Work, library_work, product_kind
from mxcompile.offline.rates import Rates
from mxcompile.policy import ATTENTION_PRODUCTS
from mxcompile.report import STORED, GemmRecord, OperandFormat, Report

_MXFP8 = 1 + 1 / BLOCK
_BF16 = 2.0
WIDE = {"float32": 4.0, "float64": 8.0}
"""Element sizes in bytes of the dtypes that do not multiply at BF16's rate."""


def estimate(report: Report) -> Report:
    """Returns `report` with an estimate in every record, or unchanged if its target has no known peaks."""
    target = TARGETS.get(report.summary.target)
    if target is None or target.peak is None:
        return report
    rates, siblings = Rates.for_target(target), Counter(map(_siblings, report.gemms))
    trained = {gemm.name for gemm in report.gemms if gemm.gemm != "fprop"}
    gemms = []
    for gemm in report.gemms:
        if gemm.is_known:
            times = _Times(gemm, rates, siblings[_siblings(gemm)], 1 + (gemm.name in trained))
            gemm = dataclasses.replace(gemm, estimate_bf16_us=times.unquantized, estimate_us=times.quantized)
        gemms.append(gemm)
    summary = dataclasses.replace(
        report.summary,
        estimate_us=sum(gemm.estimate_us or 0.0 for gemm in gemms),
        estimate_bf16_us=sum(gemm.estimate_bf16_us or 0.0 for gemm in gemms),
    )
    return dataclasses.replace(report, gemms=tuple(gemms), summary=summary)


def operand_bytes(gemm: GemmRecord) -> tuple[float, float]:
    """Returns the bytes of both operands of `gemm`, in their format and in BF16."""
    a, b, _ = _elements(gemm)
    if not is_quantized(gemm.precision):
        return _BF16 * (a + b), _BF16 * (a + b)
    sizes = (_format(fmt).bytes_per_element for fmt in gemm.formats)
    return sum(size * numel for size, numel in zip(sizes, (a, b), strict=True)), _BF16 * (a + b)


def is_emulated(gemm: GemmRecord, target: Target) -> bool:
    """Whether `gemm` is quantized to formats that `target` does not multiply."""
    if not is_quantized(gemm.precision):
        return False
    forms = [_format(operand) for operand in gemm.formats]
    return not product_kind(families(forms, target)[0], forms[0], target)


@dataclass(frozen=True, slots=True)
class _Times:
    """Times of `gemm` in µs. siblings: GEMMs that share the cast of x. copies: copies that a cast makes."""

    gemm: GemmRecord
    rates: Rates
    siblings: int
    copies: int

    @property
    def unquantized(self) -> float:
        """The time in µs without quantization, in the GEMM's own dtype."""
        gemm, target = self.gemm, self.rates.target
        sizes = _elements(gemm)
        kind = "fp32" if gemm.dtype in WIDE else "bf16"
        numel = sum(sizes)
        if gemm.role in ATTENTION_PRODUCTS:
            numel -= max(sizes)  # the scores
            kind = attention_backend(target) + ("" if gemm.gemm == "fprop" else "_backward")
        return self._product(self._width * numel, kind)

    @property
    def quantized(self) -> float:
        """The time in µs under the policy, with casts."""
        gemm = self.gemm
        if not is_quantized(gemm.precision):
            return self.unquantized
        a, b, out = _elements(gemm)
        forms = [_format(operand) for operand in gemm.formats]
        family = families(forms, self.rates.target)[0]
        kind = product_kind(family, forms[0], self.rates.target, by_library=gemm.batch == 1)
        casts = product_bytes = 0.0
        for numel, form, operand in zip((a, b), forms, gemm.formats, strict=True):
            as_mx = kind in ("mxfp8", "own_mxfp8") and form.mx_elem is not None
            width = _MXFP8 if form.is_mx or as_mx else form.bytes_per_element
            product_bytes += width * numel
            if operand.rounding != STORED:
                casts += self._cast(numel, width if kind else self._width, form, operand)
            elif not kind:
                casts += self._streamed((width + self._width) * numel)  # a stored weight is dequantized
        return casts + (self._product(product_bytes + self._width * out, kind) if kind else self.unquantized)

    def _cast(self, numel: int, width: float, form: Format, operand: OperandFormat) -> float:
        """Returns the GEMM's share of the launch that casts an operand. width: bytes of a result."""
        reads = 2 if form.of_tensor and form.amax.kind is not AmaxKind.DELAYED else 1
        launch = self._streamed((reads * self._width + self.copies * width) * numel)
        return launch / self.copies / (self.siblings if operand.operand == "x" else 1)

    def _product(self, num_bytes: float, kind: str) -> float:
        target = self.rates.target
        work = library_work(num_bytes=num_bytes, flops=self.gemm.flops, product=kind, target=target)
        return work.estimate(self.rates).us

    def _streamed(self, num_bytes: float) -> float:
        return Work(num_bytes=num_bytes).estimate(self.rates).us

    @property
    def _width(self) -> float:
        return WIDE.get(self.gemm.dtype, _BF16)


def _siblings(gemm: GemmRecord) -> tuple[object, ...]:
    """Returns a key shared by GEMMs that read the same input: layers with one role in one module."""
    parent = gemm.name.rpartition(".")[0]
    return gemm.graph, parent, gemm.role, gemm.gemm, gemm.batch, gemm.m if gemm.gemm != "dgrad" else gemm.name


def _format(operand: OperandFormat) -> Format:
    """Returns the format of an operand. A stored weight has no rounding, which does not matter here."""
    derivation = Rounding.RCEIL if operand.rounding == STORED else operand.rounding
    words = operand.elem, operand.block, derivation, operand.elements, operand.amax, operand.scales
    return Format.parse(" ".join(words))


def _elements(gemm: GemmRecord) -> tuple[int, int, int]:
    batch, m, n, k = (size or 0 for size in (gemm.batch, gemm.m, gemm.n, gemm.k))
    return batch * m * k, batch * k * n, batch * m * n
