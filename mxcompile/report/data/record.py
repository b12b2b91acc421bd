"""The data of a report: one record per GEMM and a summary."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mxcompile.formats import MAX, ElemRounding, is_quantized
from mxcompile.report.data.outline import Outline

SCHEMA = 1
"""Version of the JSON form."""

NOT_COMPILED = "not compiled yet"
"""Kernel of a GEMM that is planned and that no compiled graph contains."""

STORED = "stored"
"""Stands for the rounding of a weight that the model stores quantized: this GEMM does not cast it."""


def flops_of(*sizes: int | None) -> int:
    """Returns the floating-point operations of a product, two per multiply-add; 0 if a size is None."""
    factors = [size for size in sizes if size is not None]
    return 2 * math.prod(factors) if len(factors) == len(sizes) else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OperandFormat:
    """The quantized format of one operand of a GEMM.

    operand: "x" (input), "w" (weight) or "dy" (output gradient). elem: element type, such as "e4m3" or
    "e2m1". block: scale granularity, such as "1x32" (along the contraction dimension) or "32x32". rounding:
    rounding of the scale, or `STORED`. elements: rounding of the elements. amax: statistic that sets the
    scale, such as "max" or "percentile:99.9". transform: transform of the tensor before the cast, "" if none.
    scales: choice of block scales (four over six) and row scaling, "" without both.
    """

    operand: str
    elem: str
    block: str
    rounding: str
    elements: str = str(ElemRounding.NEAREST)
    amax: str = "max"
    transform: str = ""
    scales: str = ""

    def __str__(self) -> str:
        return f"{self.operand}:{self.format}"

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the format, in order; some may be empty."""
        return self.elem, self.block, self.rounding, self.elements, self.amax, self.transform, self.scales

    @property
    def format(self) -> str:
        """The format as one string, without the default rounding of elements and the default amax."""
        usual = (str(ElemRounding.NEAREST), str(MAX), "")
        return " ".join([*self.words[:3], *(word for word in self.words[3:] if word not in usual)])


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmRecord:
    """One matrix product of the model: its precision, its kernel and the reasons.

    Attributes:
        name: full module path of the layer.
        module: class name of the module.
        role: role of the layer, see `mxcompile.policy.Role`.
        gemm: "fprop", "dgrad" or "wgrad".
        batch, m, n, k: sizes of [batch, m, k] · [batch, k, n]. A symbolic size has its value at compile time;
            a size that depends on data is None.
        precision: "mxfp8" or another quantized precision, or "bf16" for a GEMM left in the dtype of the
            model.
        formats: formats of both operands of a quantized GEMM, or of the stored weight alone.
        dtype: torch's name of the result's dtype, "" if unknown. A GEMM that is not quantized computes in it.
        kernel: kernel chosen by the lowering, "" before the lowering runs.
        reason: reason for the precision, as a sentence.
        code, facts: code and parameters of the reason (see `mxcompile.policy.Reason`), "" in files without
            them.
        source: ``file:line`` of the product.
        evidence: why the layer has its role.
        nearest: the second best role, and its condition that the layer fails; "" if there is none.
        block: index of the repeated block that contains the layer, and the number of these blocks.
        graph: index of the graph in the report.
        estimate_us, estimate_bf16_us: estimated times in µs, with casts and in BF16. Only `explain` sets
            them, for targets with known peaks.
    """

    name: str
    role: str
    gemm: str
    m: int | None
    n: int | None
    k: int | None
    precision: str
    reason: str
    batch: int | None = 1
    formats: tuple[OperandFormat, ...] = ()
    dtype: str = ""
    kernel: str = ""
    module: str = ""
    source: str = ""
    evidence: str = ""
    nearest: str = ""
    code: str = ""
    facts: tuple[str, ...] = ()
    block: tuple[int, int] | None = None
    graph: int = 0
    estimate_us: float | None = None
    estimate_bf16_us: float | None = None

    @property
    def flops(self) -> int:
        """Floating-point operations, two per multiply-add; 0 if a size is unknown."""
        return flops_of(self.batch, self.m, self.n, self.k)

    @property
    def is_known(self) -> bool:
        """Whether all sizes are known, and with them the FLOPs."""
        return None not in (self.batch, self.m, self.n, self.k)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Metadata of a field of the summary: how reports show the number, and how they add it up.

    label: title, "" for a number that only supplements another. unit: key of `forms.words.UNITS`. is_shown:
    whether the report has a line and a tile for the number if it is not 0. per_run: whether a training step
    counts the number once for each module that runs the code.
    """

    label: str
    unit: str
    is_shown: bool = True
    per_run: bool = False


def _figure(default: Any, label: str = "", unit: str = "count", **options: bool) -> Any:
    """Returns a field of a dataclass with a `Figure` as metadata."""
    return field(default=default, metadata={"figure": Figure(label=label, unit=unit, **options)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """The numbers of a compiled graph, or their sums over the graphs of a model.

    Attributes:
        saved_bytes, saved_bytes_bf16: bytes saved from forward for backward, with mxcompile and without it;
            None for inference.
        casts: casts of one forward and its backward, counted by tensor and layout.
        wire_bytes, wire_bytes_bf16: bytes that this rank sends in the collectives of compiled graphs and in
            FSDP2's gathers of their weights, with mxcompile and without it.
        graph_breaks: graph breaks of Dynamo.
        pass_time_us: time spent in the passes, in µs.
        cache: state of Inductor's caches: "hit", "miss", "partial" or "off".
        warnings: warnings for the user.
    """

    saved_bytes: int | None = _figure(None, "saved for backward", "bytes", per_run=True)
    saved_bytes_bf16: int | None = _figure(None, per_run=True)
    casts: int = _figure(0, "casts per run", "count", per_run=True)
    wire_bytes: int = _figure(0, "sent by each rank", "bytes", per_run=True)
    wire_bytes_bf16: int = _figure(0, per_run=True)
    graph_breaks: int = _figure(0, "graph breaks", "count", is_shown=False)
    pass_time_us: float = _figure(0.0)
    cache: str = "off"
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary(Figures):
    """The figures of a report.

    Attributes:
        target: GPU or CPU that the code was compiled for.
        policy: name of the policy.
        num_gemms: number of records.
        flop_share: quantized share of all matmul FLOPs, 0 to 1.
        weight_bytes, weight_bytes_bf16, weight_bytes_quantized: bytes of the weights of linear layers, as
            stored, in BF16, and after `quantize_weights_`; 0 if unknown.
        graphs: number of compiled graphs.
        estimate_us, estimate_bf16_us: sums of the estimated times of all records, in µs.
        parameter_bytes: bytes of all parameters and buffers; only from `explain`, like the next two.
        gradient_bytes: bytes of all gradients of parameters.
        peak_bytes: peak memory of a step without its optimizer.
    """

    target: str = ""
    policy: str = ""
    num_gemms: int = 0
    flop_share: float = 0.0
    weight_bytes: int = _figure(0, "weights of linear layers", "bytes")
    weight_bytes_bf16: int = 0
    weight_bytes_quantized: int = 0
    graphs: int = _figure(0, "graphs", "count", is_shown=False)
    estimate_us: float | None = _figure(None, "estimate", "µs", is_shown=False)
    estimate_bf16_us: float | None = None
    parameter_bytes: int | None = None
    gradient_bytes: int | None = None
    peak_bytes: int | None = _figure(None, "peak memory", "bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part(Figures):
    """The report of one compiled graph: its records, its outline and its share of the summary's figures.

    prefix: path of the module that the graph was compiled for. twins: path and block of the other modules
    that run the same code. histories: index of each weight with a delayed scale, and the length of its
    history. weights: (layer, stored bytes, BF16 bytes, bytes after `quantize_weights_`) of each weight of a
    linear layer. token: a part of the cache keys under which Inductor stores the code of this graph.
    """

    gemms: tuple[GemmRecord, ...] = ()
    weights: tuple[tuple[str, int, int, int], ...] = ()
    outline: Outline = field(default_factory=Outline)
    prefix: str = ""
    twins: tuple[tuple[str, tuple[int, int] | None], ...] = ()
    histories: tuple[tuple[int, int], ...] = ()
    token: str = ""

    def name_in(self, twin: str, name: str) -> str:
        """Returns the name that a layer `name` of this part has in the module at `twin`."""
        inside = not (self.prefix and name) or f"{name}.".startswith(f"{self.prefix}.")
        return twin + name.removeprefix(self.prefix) if inside else name


FIGURES: dict[str, Figure] = {
    field.name: field.metadata["figure"] for field in dataclasses.fields(Summary) if field.metadata
}
"""The figures of a summary by the names of their fields, in the order in which a report shows them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportData:
    """The data of a report, independent of the output form: a record per GEMM or attention, and a summary.

    graph: outlines of the compiled graphs; `GemmRecord.graph` is an index into it.
    """

    gemms: tuple[GemmRecord, ...]
    summary: Summary
    graph: tuple[Outline, ...] = ()


def flop_share(gemms: Iterable[GemmRecord]) -> float:
    """Returns the quantized share of the FLOPs of `gemms`, 0 without GEMMs. Planned GEMMs count as BF16."""
    gemms = tuple(gemms)
    total = sum(gemm.flops for gemm in gemms)
    compiled = (gemm for gemm in gemms if gemm.kernel != NOT_COMPILED)
    return sum(gemm.flops for gemm in compiled if is_quantized(gemm.precision)) / total if total else 0.0
