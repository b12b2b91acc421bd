"""One kernel launch of a step, and one generated kernel."""

from __future__ import annotations

from dataclasses import dataclass

from mxcompile import ops
from mxcompile.offline.binary import Binary
from mxcompile.offline.estimate import Estimate, Work
from mxcompile.offline.kernel_work import Facts

CASTS = frozenset(f"{operator}.default" for operator in ops.CAST_WORK)
"""Names of cast operators, and of operators that only prepare casts."""

_KERNELS = "from mxcompile.lowering.kernels import"
"""Import in the source of every template of mxcompile."""


COLLECTIVE = "collective"
"""Kind of a launch that runs a collective or waits for it. It has no estimate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One kernel launch of a step.

    phase: "forward", "backward" or "inference", numbered if the model has several graphs. kernel: name of a
    generated kernel or of a library operator. generated: whether it is generated. gemms: GEMMs it computes,
    as ``layer gemm``. operators: operators it computes, without views. cast: source of a launch that only
    casts: "input" (a weight, or a tensor saved for backward), "library" (result of a library kernel) or
    "generated" (result of a generated kernel, a missed fusion); else "". num_bytes: lower bound of the bytes
    it moves. flops: FLOPs of its products. library: name of the library kernel in the GEMM's record. work,
    estimate: see `estimate`; None for a chip without known peaks. facts: figures from the machine code.
    """

    phase: str
    kernel: str
    generated: bool
    gemms: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    cast: str = ""
    num_bytes: int = 0
    flops: float = 0.0
    library: str = ""
    work: Work | None = None
    estimate: Estimate | None = None
    facts: Facts | None = None

    @property
    def kind(self) -> str:
        """Kind: "product", "cast" (alone or fused with its producer), "attention", "collective" or "rest"."""
        if "_c10d_functional" in self.kernel:
            return COLLECTIVE
        if self.gemms:
            return "attention" if "attention" in self.kernel else "product"
        return "rest" if CASTS.isdisjoint(self.operators) else "cast"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """A generated kernel of a phase: Inductor's Triton module and the compiled binary."""

    phase: str
    name: str
    source: str
    binary: Binary

    @property
    def is_template(self) -> bool:
        """Whether it is a template of mxcompile, not a kernel of Inductor."""
        return _KERNELS in self.source

    @property
    def spill(self) -> str:
        """A sentence about its register spills."""
        whose = "mxcompile's" if self.is_template else "Inductor's own"
        return f"{self.phase} {self.name} ({whose}) spills {self.binary.spill_bytes} bytes a thread"
