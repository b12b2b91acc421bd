"""A pass of the lowering: a value that says which targets it is for, and rewrites a graph for one of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from mxcompile.lowering import optional
from mxcompile.lowering.targets import Target

Reasons = Mapping[fx.Node, str]
"""Why products are not on a kernel that a pass is for, by their nodes. The record of a product says it."""

NO_REASONS: Reasons = {}

EMPTY = "a dimension is empty"
"""Why products without elements are not on a kernel that others of their kind are on."""

NATIVE = ("templates.casts", "templates.scaled_mm", "templates.scaled_grouped_mm")
"""The templates of MX products, and of the casts that they read."""

COLLECTED = ("templates.casts", "templates.operand_casts")
"""The templates of casts whose values the vendor's GEMM multiplies."""

FP8_CASTS = ("templates.fp8_casts",)
"""The templates of casts with FP32 scales."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweringPass(ABC):
    """One rewrite of a graph for a target, in place.

    target: the chip. device: type of the device whose tensors stand for those of the target; a graph may have
    others. promotes: whether slow products run in FP32 in graphs without MX data too (see `promote`).
    """

    target: Target
    device: str
    promotes: bool = True
    name: ClassVar[str]
    templates: ClassVar[tuple[str, ...]] = ()
    """The modules whose kernels run what the pass makes."""

    @property
    def applies(self) -> bool:
        """Whether the pass is for the target."""
        return True

    @property
    def obstacle(self) -> str:
        """Why the kernels of the pass cannot be used here; "" if they can. Asked only where it applies."""
        return optional.obstacle(*self.templates)

    def candidates(self, graph: fx.Graph) -> Iterable[fx.Node]:
        """The products of `graph` whose records give the obstacle as a reason."""
        del graph
        return ()

    @abstractmethod
    def apply(self, graph: fx.Graph) -> Reasons:
        """Transform `graph`, a valid graph, into a valid graph. Returns why products were passed over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NativePass(LoweringPass):
    """A pass for chips with an MX GEMM of their own."""

    templates: ClassVar[tuple[str, ...]] = NATIVE

    @property
    def applies(self) -> bool:
        """Whether the chip multiplies MX operands itself."""
        return self.target.native
