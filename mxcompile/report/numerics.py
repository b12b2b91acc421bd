"""The data of an audit: per cast tensor, per quantized GEMM, per gradient, and of the whole model.

    sqnr_db    10 · log10(Σ x² / Σ (q − x)²)      inf: no error at all; nan: x or q is not finite
    rel_error  √(Σ (q − x)² / Σ x²)
    cosine     Σ x·q / √(Σ x² · Σ q²)
    mse        Σ (q − x)² / numel
    harm       FLOPs · rel_error²                 of a GEMM; forward GEMMs share their sum by output_change²
               FLOPs · (rel_error² + lost)        of a cast, with those of the GEMMs that read it

x is the tensor before its cast, or the product of the tensors before their casts; q is what took its place.
The rows with most harm are the worst. An error counts by the FLOPs that it enters. SQNR hardly sees small
elements, so the share of magnitudes that a cast loses counts too. A row of rounding noise beside ordinary
rows loses many elements, but little magnitude and so without harm. `output_change` says how far the error
of a forward GEMM reaches (see `mxcompile.analysis.audit.output_sensitivity`); it counts more than FLOPs.
Nothing is measured here (see `mxcompile.analysis.audit`), and tensors are not kept.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from mxcompile.report import schema
from mxcompile.report.schema import Measure

_Measured = TypeVar("_Measured", "TensorNumerics", "GemmNumerics", "ParameterNumerics")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorNumerics:
    """One cast of one tensor.

    name: full module path of the first layer that reads it. role: of that layer. operand: "x" (input), "w"
    (weight) or "dy" (output gradient). layout: "rowwise" if blocks run along the last dimension of the tensor
    as it is stored, else "columnwise". gemms: "fprop", "dgrad", "wgrad", those that read it. shared_with:
    paths of the other layers that read it. elem: "e4m3" or "e5m2". block: "1x32" or "32x32". rounding: of the
    scale. elements: how they round. amax_of: what the scale
    follows from. calls: how often the cast ran; the rest is over all calls together.

    numel: elements. amax: largest finite magnitude. sqnr_db, cosine, mse, rel_error: see the module.
    underflow: the share of finite elements other than 0 whose cast is 0, 0 to 1. saturation: the share of
    finite elements cut off at the largest value of the element type. lost: share of the sum of magnitudes
    that the elements cast to 0 had. not_finite: elements that are NaN or Inf or share a block with one.
    scale_histogram: pairs of E8M0 byte and number of blocks, ascending. flops: of the GEMMs that read it.
    """

    name: str
    role: str
    operand: str
    layout: str
    gemms: tuple[str, ...]
    elem: str
    rounding: str
    block: str = "1x32"
    elements: str = "nearest"
    amax_of: str = "max"
    shared_with: tuple[str, ...] = ()
    calls: int = 1
    numel: int
    amax: Measure
    sqnr_db: Measure
    cosine: Measure
    mse: Measure
    rel_error: Measure
    underflow: float
    saturation: float
    lost: float = 0.0
    not_finite: int = 0
    scale_histogram: tuple[tuple[int, int], ...] = ()
    flops: int = 0

    @property
    def harm(self) -> float:
        """See the module."""
        return max(self.flops, 1) * (self.rel_error**2 + self.lost)


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmNumerics:
    """The output of one quantized GEMM against the FP32 GEMM of its operands before their casts.

    name, role, gemm, batch, m, n, k: as in `GemmRecord`. calls: how often it ran; the rest is over all calls
    together. sqnr_db, cosine, mse, rel_error: see the module. not_finite: elements of either output that are
    NaN or Inf. output_change: of a forward GEMM, by which share of its size the model's main output would
    change if this GEMM alone was quantized, an estimate; None of a backward GEMM, or if no gradient was seen.
    """

    name: str
    role: str
    gemm: str
    m: int
    n: int
    k: int
    batch: int = 1
    calls: int = 1
    sqnr_db: Measure
    cosine: Measure
    mse: Measure
    rel_error: Measure
    not_finite: int = 0
    output_change: Measure | None = None

    @property
    def flops(self) -> int:
        """Floating-point operations of all calls: two per multiply-add."""
        return 2 * self.batch * self.m * self.n * self.k * self.calls

    @property
    def harm(self) -> float:
        """FLOPs · rel_error²; `Numerics.harm_of_gemms` knows the output's change too."""
        return self.flops * self.rel_error**2


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterNumerics:
    """The gradient of one parameter under the policy against the one of the unquantized model.

    name: of the parameter. role: of its layer, "" for a parameter of no GEMM. flops: of its wgrad, 0 if it
    has none. numel: elements. sqnr_db, cosine, mse, rel_error, not_finite: as of a GEMM's output.
    """

    name: str
    role: str = ""
    flops: int = 0
    numel: int
    sqnr_db: Measure
    cosine: Measure
    mse: Measure
    rel_error: Measure
    not_finite: int = 0

    @property
    def harm(self) -> float:
        """See the module: as of a GEMM."""
        return max(self.flops, 1) * self.rel_error**2


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """Everything an audit measured.

    tensors: one per cast. gemms: one per quantized GEMM. parameters: one per gradient of a parameter.
    precision: what GEMMs were quantized to, own_dtype: what they are in otherwise, as texts say it. policy:
    that was audited. gradients: whether a backward ran, without which there are no "dy", dgrad or wgrad.
    loss, loss_reference: of the model under the policy and unquantized, both run by the audit; None without a
    loss. loss_gap: loss / loss_reference − 1, a signed share. logits_sqnr_db, logits_cosine: of the model's
    main output under the policy against the unquantized one; None if it has no floating-point output. notes:
    what a reader should know.
    """

    tensors: tuple[TensorNumerics, ...] = ()
    gemms: tuple[GemmNumerics, ...] = ()
    parameters: tuple[ParameterNumerics, ...] = ()
    precision: str = "MXFP8"
    own_dtype: str = "BF16"
    policy: str = ""
    gradients: bool = False
    loss: Measure | None = None
    loss_reference: Measure | None = None
    loss_gap: Measure | None = None
    logits_sqnr_db: Measure | None = None
    logits_cosine: Measure | None = None
    notes: tuple[str, ...] = ()

    def worst_tensors(self) -> tuple[TensorNumerics, ...]:
        """`tensors`, those with most harm (NaN before all) first."""
        return _worst_first(self.tensors)

    def worst_gemms(self) -> tuple[GemmNumerics, ...]:
        """`gemms`, those with most harm (NaN before all) first."""
        return _worst_first(self.gemms, self.harm_of_gemms())

    def harm_of_gemms(self) -> Callable[[GemmNumerics], float]:
        """Returns a function that gives the harm of one of `gemms`; see the module."""
        known = [gemm for gemm in self.gemms if gemm.output_change is not None]
        squares = sum((gemm.output_change or 0.0) ** 2 for gemm in known)
        share = sum(gemm.harm for gemm in known) / squares if squares else math.nan
        if not math.isfinite(share):
            return lambda gemm: gemm.harm
        return lambda gemm: gemm.harm if gemm.output_change is None else share * gemm.output_change**2

    def worst_parameters(self) -> tuple[ParameterNumerics, ...]:
        """`parameters`, those with most harm (NaN before all) first."""
        return _worst_first(self.parameters)

    @property
    def lowest_sqnr_db(self) -> float | None:
        """The lowest SQNR of the GEMMs; nan if one of them has nan, None if there are none."""
        return lowest(gemm.sqnr_db for gemm in self.gemms) if self.gemms else None

    @property
    def gradient_error(self) -> float | None:
        """Mean of the parameters' `rel_error`, weighted by FLOPs; None without gradients of weights."""
        return self._weighted(lambda one: one.rel_error)

    @property
    def gradient_cosine(self) -> float | None:
        """Mean of the parameters' `cosine`, weighted by FLOPs; None without gradients of weights."""
        return self._weighted(lambda one: one.cosine)

    def _weighted(self, measure: Callable[[ParameterNumerics], float]) -> float | None:
        total = sum(one.flops for one in self.parameters)
        weighed = (one.flops * measure(one) for one in self.parameters if one.flops)
        return sum(weighed) / total if total else None

    def to_dict(self) -> dict[str, Any]:
        """As plain dicts, lists, strings and numbers, fit for JSON: inf and nan are words."""
        result = _plain(dataclasses.asdict(self))
        assert isinstance(result, dict)
        return result

    @classmethod
    def from_dict(cls, data: Any) -> Numerics:
        """The value `to_dict` gave. Raises `OptionError` with its place in an audit for anything else."""
        return schema.read(cls, data, "$.numerics")


def lowest(values: Iterable[float]) -> float:
    """The least of `values`, of which there is one at least; nan if one is."""
    numbers = list(values)
    return math.nan if any(map(math.isnan, numbers)) else min(numbers)


def _worst_first(
    measured: Iterable[_Measured], weight: Callable[[_Measured], float] = lambda one: one.harm
) -> tuple[_Measured, ...]:
    def key(one: _Measured) -> float:
        return -math.inf if math.isnan(one.sqnr_db) or math.isnan(weight(one)) else -weight(one)

    return tuple(sorted(measured, key=key))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value
