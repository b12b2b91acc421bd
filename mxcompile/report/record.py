"""The data of a report: one record per GEMM and a summary."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from mxcompile.formats import MAX, ElemRounding, is_quantized
from mxcompile.report.outline import Outline

SCHEMA = 1
"""Version of the JSON form."""

NOT_COMPILED = "not compiled yet"
"""The kernel of a GEMM that is planned, and in no graph that was compiled."""

STORED = "stored"
"""In place of a rounding: of a weight that the model holds in MXFP8, and that no cast of this GEMM makes."""


def flops_of(*sizes: int | None) -> int:
    """Floating-point operations of a product, two per multiply-add; 0 if one of its `sizes` is not known."""
    known = [size for size in sizes if size is not None]
    return 2 * math.prod(known) if len(known) == len(sizes) else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OperandFormat:
    """How one operand of a GEMM was quantized.

    operand: "x" (input), "w" (weight) or "dy" (output gradient). elem: "e4m3" or "e5m2". block: "1x32",
    along the contraction dimension, or "32x32". rounding: of the scale, or `STORED`. elements: how they
    round. amax: what the scale follows from if not the largest magnitude, "percentile:99.9" say. transform:
    of the tensor before it is cast, "" without one.
    """

    operand: str
    elem: str
    block: str
    rounding: str
    elements: str = str(ElemRounding.NEAREST)
    amax: str = "max"
    transform: str = ""

    def __str__(self) -> str:
        return f"{self.operand}:{self.format}"

    @property
    def words(self) -> tuple[str, ...]:
        """The format, as `Format.of` reads it."""
        given = self.elem, self.block, self.rounding, self.elements, self.amax, self.transform
        return tuple(filter(None, given))

    @property
    def format(self) -> str:
        """The same in one string, without what is as usual."""
        usual = (str(ElemRounding.NEAREST), str(MAX))
        return " ".join([*self.words[:3], *(word for word in self.words[3:] if word not in usual)])


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmRecord:
    """One matrix product of the model: what was done with it, by which kernel, and why.

    name: full module path. module: class name of the module. role: see `mxcompile.policy.Role`. gemm:
    "fprop", "dgrad" or "wgrad". batch, m, n, k: sizes of [batch, m, k] · [batch, k, n]; a symbolic size is
    its value when compiled, and None if it depends on data. precision: "mxfp8", or "bf16" for a GEMM left in
    the model's own dtype. formats: of both operands in MXFP8; of a stored weight alone where the GEMM is not.
    dtype: of the result, as torch names it, "" where it is not known; a GEMM that is left alone computes in
    it. kernel: what the lowering chose, "" before lowering. reason: for the precision, as a sentence. code,
    facts: of the reason (see `mxcompile.policy.Reason`); "" in files of versions that had none. source:
    ``file:line``. evidence: why it has its role. nearest: the other role that came nearest, and what it
    lacks; "" if none did. block: number, from 0, of the repeated block it lies in and how many there are.
    graph: position of its graph in the report. estimate_us, estimate_bf16_us: rooflines with casts, and in
    BF16; only from `explain`, for targets with known peaks.
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
        """Floating-point operations: two per multiply-add; 0 where a size is not known."""
        return flops_of(self.batch, self.m, self.n, self.k)

    @property
    def is_known(self) -> bool:
        """Whether all sizes are known, and so the FLOPs."""
        return None not in (self.batch, self.m, self.n, self.k)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A report in numbers.

    target, policy: what was compiled for and by which policy. num_gemms: records. flop_share: part of all
    matmul FLOPs in MXFP8, 0 to 1. saved_bytes: kept from forward to backward; saved_bytes_bf16: the same
    without mxcompile; both None for inference. weight_bytes: of the weights of linear layers as the model
    holds them; weight_bytes_bf16: in BF16. casts: those
    that a forward and its backward make, one for each tensor and layout. wire_bytes: given by
    this rank to the collectives in compiled graphs, and to FSDP2's gathers of the weights that these read;
    wire_bytes_bf16: without mxcompile. pass_time_us: spent in the passes. graphs: compiled graphs.
    graph_breaks: that Dynamo made in this frame. cache: "hit" if compiled code came from Inductor's caches,
    "miss", or "off". warnings: what a user should know.
    estimate_us, estimate_bf16_us: sums of the records', for all matmuls and casts. parameter_bytes,
    gradient_bytes, peak_bytes: from `explain` alone, of all parameters and buffers, of their gradients, and
    of a step without its optimizer.
    """

    target: str = ""
    policy: str = ""
    num_gemms: int = 0
    flop_share: float = 0.0
    saved_bytes: int | None = None
    saved_bytes_bf16: int | None = None
    weight_bytes: int = 0
    weight_bytes_bf16: int = 0
    casts: int = 0
    wire_bytes: int = 0
    wire_bytes_bf16: int = 0
    pass_time_us: float = 0.0
    graphs: int = 0
    graph_breaks: int = 0
    cache: str = "off"
    warnings: tuple[str, ...] = ()
    estimate_us: float | None = None
    estimate_bf16_us: float | None = None
    parameter_bytes: int | None = None
    gradient_bytes: int | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The records of one compiled graph, its picture, and its share of the summary's numbers.

    prefix: path of the module that the graph was compiled for. twins: path and
    block of the modules that run the same code. histories: of the tapped weights whose scales follow
    from calls before, the position and how many calls count. weights: of linear layers, each once: of which
    layer, its bytes as the model holds it, and in BF16. token: a part of the keys under which Inductor's
    caches keep the code that this part describes.
    """

    gemms: tuple[GemmRecord, ...] = ()
    saved_bytes: int | None = None
    saved_bytes_bf16: int | None = None
    weights: tuple[tuple[str, int, int], ...] = ()
    casts: int = 0
    wire_bytes: int = 0
    wire_bytes_bf16: int = 0
    pass_time_us: float = 0.0
    graph_breaks: int = 0
    cache: str = "off"
    warnings: tuple[str, ...] = ()
    outline: Outline = field(default_factory=Outline)
    prefix: str = ""
    twins: tuple[tuple[str, tuple[int, int] | None], ...] = ()
    histories: tuple[tuple[int, int], ...] = ()
    token: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportData:
    """The data of a report, in no form: one record per GEMM and attention product, and a summary.

    graph: a picture of every compiled graph, at the position that the records of the graph carry.
    """

    gemms: tuple[GemmRecord, ...]
    summary: Summary
    graph: tuple[Outline, ...] = ()


def flop_share(gemms: Iterable[GemmRecord]) -> float:
    """Part of the FLOPs of `gemms` that is in MXFP8; 0 if there are none; planned ones do not count."""
    gemms = tuple(gemms)
    total = sum(gemm.flops for gemm in gemms)
    compiled = (gemm for gemm in gemms if gemm.kernel != NOT_COMPILED)
    return sum(gemm.flops for gemm in compiled if is_quantized(gemm.precision)) / total if total else 0.0
