"""The data of an audit: errors of cast tensors, of quantized GEMMs, of gradients, and of the whole model.

    sqnr_db    10 · log10(Σ x² / Σ (q − x)²)      inf: no error; nan: x or q is not finite
    rel_error  √(Σ (q − x)² / Σ x²)
    cosine     Σ x·q / √(Σ x² · Σ q²)
    mse        Σ (q − x)² / numel
    harm       FLOPs · rel_error²                 for a GEMM; `harm_of_gemms` has the harm of forward GEMMs
               FLOPs · (rel_error² + lost)        for a cast, with the FLOPs of the GEMMs that read it

x is the tensor before its cast, or the product of the unquantized tensors; q is the quantized counterpart.
Rows are ranked by harm, which weights an error by the FLOPs of the GEMMs that it enters. SQNR hardly depends
on small elements, so harm adds the share of the magnitude that a cast loses. A row that holds only
rounding noise loses many elements but little magnitude, so it adds little harm. `output_change` estimates the
effect of a forward GEMM on the model's output (see `mxcompile.analysis.study.interpreter`) and takes
precedence over FLOPs. `mxcompile.analysis.audit` measures; this module holds the figures and no tensors.

The error of a group (a role or a block) is √(Σ FLOPs · rel_error² / Σ FLOPs) over its GEMMs. Its underflow is
the mean over its casts, weighted by FLOPs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from mxcompile.report.data import schema
from mxcompile.report.data.fold import grouped
from mxcompile.report.data.outline import inner_block
from mxcompile.report.data.schema import Measure

_Measured = TypeVar("_Measured", "TensorNumerics", "GemmNumerics", "ParameterNumerics")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorNumerics:
    """One cast of one tensor.

    name: full module path of the first layer that reads it. role: role of that layer. operand: "x" (input),
    "w" (weight) or "dy" (output gradient). layout: "rowwise" if the scale blocks run along the last dimension
    of the stored tensor, else "columnwise". gemms: the GEMMs that read it ("fprop", "dgrad", "wgrad").
    shared_with: paths of the other layers that read it. elem: element type, such as "e4m3". block: scale
    granularity, such as "1x32". rounding: rounding of the scale. elements: rounding of the elements. amax_of:
    statistic that sets the scale. calls: number of runs of the cast; all other figures cover all calls.

    numel: number of elements. amax: largest finite magnitude. sqnr_db, cosine, mse, rel_error: see the
    module. underflow: share of the finite nonzero elements that are cast to 0. saturation: share of the
    finite elements that are clipped to the largest value of the element type. lost: share of the sum of
    magnitudes in elements cast to 0. not_finite: number of elements that are NaN or Inf or share a block with
    such an element. scale_histogram: pairs of E8M0 byte and number of blocks, ascending. flops: FLOPs of the
    GEMMs that read it.
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
        """FLOPs · (rel_error² + lost), see the module."""
        return max(self.flops, 1) * (self.rel_error**2 + self.lost)


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmNumerics:
    """The output of one quantized GEMM compared with the FP32 GEMM of its unquantized operands.

    name, role, gemm, batch, m, n, k: as in `GemmRecord`. calls: number of runs; all other figures cover all
    calls. sqnr_db, cosine, mse, rel_error: see the module. not_finite: number of elements of either output
    that are NaN or Inf. output_change: estimated relative change of the model's main output if only this
    forward GEMM was quantized; None for a backward GEMM or without a gradient.
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
        """Floating-point operations of all calls, two per multiply-add."""
        return 2 * self.batch * self.m * self.n * self.k * self.calls

    @property
    def harm(self) -> float:
        """FLOPs · rel_error². `Numerics.harm_of_gemms` takes `output_change` into account as well."""
        return self.flops * self.rel_error**2


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterNumerics:
    """The gradient of one parameter under the policy compared with the unquantized model's.

    name: name of the parameter. role: role of its layer, "" if the parameter is in no GEMM. flops: FLOPs of
    its wgrad, 0 without a wgrad. numel: number of elements. sqnr_db, cosine, mse, rel_error, not_finite: as
    in `GemmNumerics`.
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
        """FLOPs · rel_error², see the module."""
        return max(self.flops, 1) * self.rel_error**2


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """All figures of an audit.

    tensors: figures by cast. gemms: figures by quantized GEMM. parameters: figures by parameter gradient.
    precision, own_dtype: names of the quantized precision and of the model's dtype, for texts. policy: name
    of the audited policy. gradients: whether a backward ran; if not, there are no "dy", dgrad and wgrad.
    loss, loss_reference: loss under the policy and unquantized, None without a loss. loss_gap: loss /
    loss_reference − 1, signed. logits_sqnr_db, logits_cosine: main output under the policy against the
    unquantized output; None if it is not floating-point. notes: remarks for the reader.
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
        """Returns `tensors` sorted by harm, largest first; NaN precedes all."""
        return _worst_first(self.tensors)

    def worst_gemms(self) -> tuple[GemmNumerics, ...]:
        """Returns `gemms` sorted by harm, largest first; NaN precedes all."""
        return _worst_first(self.gemms, self.harm_of_gemms())

    def harm_of_gemms(self) -> Callable[[GemmNumerics], float]:
        """Returns the harm as a function. GEMMs with `output_change` share their harm as output_change²."""
        measured = [gemm for gemm in self.gemms if gemm.output_change is not None]
        squares = sum((gemm.output_change or 0.0) ** 2 for gemm in measured)
        share = sum(gemm.harm for gemm in measured) / squares if squares else math.nan
        if not math.isfinite(share):
            return lambda gemm: gemm.harm
        return lambda gemm: gemm.harm if gemm.output_change is None else share * gemm.output_change**2

    def worst_parameters(self) -> tuple[ParameterNumerics, ...]:
        """Returns `parameters` sorted by harm, largest first; NaN precedes all."""
        return _worst_first(self.parameters)

    @property
    def lowest_sqnr_db(self) -> float | None:
        """Lowest SQNR of the GEMMs; nan if any is nan, None without GEMMs."""
        return lowest(gemm.sqnr_db for gemm in self.gemms) if self.gemms else None

    @property
    def gradient_error(self) -> float | None:
        """Mean of the parameters' `rel_error`, weighted by FLOPs; None without gradients of weights."""
        return self._weighted(lambda parameter: parameter.rel_error)

    @property
    def gradient_cosine(self) -> float | None:
        """Mean of the parameters' `cosine`, weighted by FLOPs; None without gradients of weights."""
        return self._weighted(lambda parameter: parameter.cosine)

    def _weighted(self, measure: Callable[[ParameterNumerics], float]) -> float | None:
        total = sum(parameter.flops for parameter in self.parameters)
        weighed = (parameter.flops * measure(parameter) for parameter in self.parameters if parameter.flops)
        return sum(weighed) / total if total else None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts, lists, strings and numbers for JSON; inf and nan are strings."""
        result: dict[str, Any] = _plain(dataclasses.asdict(self))
        return result

    @classmethod
    def from_dict(cls, data: Any) -> Numerics:
        """Returns the numerics that `to_dict` wrote. Raises `OptionError` with the JSON path of a fault."""
        return schema.read(cls, data, "$.numerics")


def lowest(values: Iterable[float]) -> float:
    """Returns the minimum of `values`, which must not be empty; nan if any value is nan."""
    numbers = list(values)
    return math.nan if any(map(math.isnan, numbers)) else min(numbers)


def _worst_first(
    measured: Iterable[_Measured], weight: Callable[[_Measured], float] = lambda parameter: parameter.harm
) -> tuple[_Measured, ...]:
    def key(row: _Measured) -> float:
        return -math.inf if math.isnan(row.sqnr_db) or math.isnan(weight(row)) else -weight(row)

    return tuple(sorted(measured, key=key))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


OUTSIDE = "outside blocks"


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """GEMMs with a common role or block, and the casts whose first reader has this role or block.

    name: role or block. flop_share: share of the FLOPs of all measured GEMMs. rel_error, underflow: see
    the module; underflow is None without casts. lowest_sqnr_db: lowest SQNR of a GEMM. worst: the GEMM with
    most harm.
    """

    name: str
    num_gemms: int
    flop_share: float
    rel_error: float
    lowest_sqnr_db: float
    underflow: float | None
    worst: GemmNumerics


def by_role(numerics: Numerics) -> list[Group]:
    """Returns a group for each role, sorted by harm, largest first."""

    def harm(group: Group) -> float:
        harm = group.flop_share * group.rel_error**2
        return math.inf if math.isnan(harm) else harm

    return sorted(_grouped(numerics, lambda gemm: gemm.role), key=harm, reverse=True)


def by_block(numerics: Numerics) -> list[Group]:
    """Returns a group for each repeated block, in the order of the model."""
    return _grouped(numerics, lambda gemm: inner_block(gemm.name) or OUTSIDE)


def _grouped(numerics: Numerics, key: Callable[[GemmNumerics | TensorNumerics], str]) -> list[Group]:
    tensors = grouped(numerics.tensors, key)
    total, groups = sum(gemm.flops for gemm in numerics.gemms) or 1, []
    for name, members in grouped(numerics.gemms, key).items():
        flops = sum(gemm.flops for gemm in members)
        read = sum(tensor.flops for tensor in tensors.get(name, ()))
        lost = sum(tensor.flops * tensor.underflow for tensor in tensors.get(name, ()))
        groups.append(
            Group(
                name=name,
                num_gemms=len(members),
                flop_share=flops / total,
                rel_error=math.sqrt(sum(gemm.harm for gemm in members) / flops) if flops else 0.0,
                lowest_sqnr_db=lowest(gemm.sqnr_db for gemm in members),
                underflow=lost / read if read else None,
                worst=Numerics(gemms=tuple(members)).worst_gemms()[0],
            )
        )
    return groups
