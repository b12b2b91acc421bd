"""One kernel launch of a step, and one generated kernel: what a target would run."""

from __future__ import annotations

from dataclasses import dataclass

from mxcompile import ops
from mxcompile.offline.binary import Binary
from mxcompile.offline.estimate import Estimate, Work
from mxcompile.offline.kernel_work import Facts

CASTS = frozenset(f"{operator}.default" for operator in ops.CAST_WORK)
"""The names of casts, and of what is computed for them alone."""

_KERNELS = "from mxcompile.lowering.kernels import"
"""What the source of a template imports."""


COLLECTIVE = "collective"
"""The kind of what sends to other ranks, or waits for it; it has no estimate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One kernel launch of a step.

    phase: "forward", "backward" or "inference", numbered where the model has several graphs. kernel: name
    of a generated kernel, or of the operator of a library. generated: which of the two. gemms: matrix
    products it computes, as ``layer gemm``. operators: of the graph it computes, views left out. cast:
    what it casts, if it does nothing but cast: "input" (a weight, or a tensor saved for backward),
    "library" (the result of a kernel that was not generated) or "generated" (the result of one that was,
    which should have cast it). num_bytes: it moves at least. flops: of its matrix products. library: how
    its record names the kernel of a library. work: what it has to do, estimate: how long that takes (see
    `estimate`), both None for a chip without known peaks. facts: of a generated kernel, what its machine code
    says.
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
        """Returns "product", "cast" (alone or in its producer), "attention", "collective", or "rest"."""
        if "_c10d_functional" in self.kernel:
            return COLLECTIVE
        if self.gemms:
            return "attention" if "attention" in self.kernel else "product"
        return "rest" if CASTS.isdisjoint(self.operators) else "cast"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """A generated kernel of a phase: its Triton module as Inductor wrote it, and what that compiles to."""

    phase: str
    name: str
    source: str
    binary: Binary

    @property
    def own(self) -> bool:
        """Whether it is a template of mxcompile; Inductor writes the others itself."""
        return _KERNELS in self.source

    @property
    def spill(self) -> str:
        """Which registers it spills, in words."""
        whose = "mxcompile's" if self.own else "Inductor's own"
        return f"{self.phase} {self.name} ({whose}) spills {self.binary.spill_bytes} bytes a thread"
