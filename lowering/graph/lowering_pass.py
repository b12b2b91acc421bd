"""The base classes of lowering passes: each applies to some targets, and rewrites a graph for its target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from mxcompile.lowering import optional
from mxcompile.lowering.choices.families import TABLE, Family
from mxcompile.lowering.cpu import kernel
from mxcompile.lowering.targets import Target

Reasons = Mapping[fx.Node, str]
"""Reasons why products do not run on the kernel of a pass, by the node of the product. Records show them."""

EMPTY = "a dimension is empty"
"""Reason for products without elements."""

CASTS = ("templates.casts",)
"""Templates of MXFP8 casts."""

NATIVE: tuple[str, ...] = (*CASTS, "templates.scaled_mm", "templates.scaled_grouped_mm")
"""Templates of MX products, and of casts of their operands."""

FP8_CASTS = ("templates.fp8_casts",)
"""Templates of casts with FP32 scales."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweringPass(ABC):
    """A rewrite of a graph for a target, in place.

    target: the chip. device: device type of the target's tensors; a graph may have other tensors too.
    promotes: whether slow products run in FP32 in graphs without mx operators too (see `promote`).
    """

    target: Target
    device: str
    promotes: bool = True
    name: ClassVar[str]
    """The name of the pass: the name of its file."""
    family: ClassVar[Family] = Family.EMULATED
    """The kernel family of the products that the pass makes."""
    templates: ClassVar[tuple[str, ...]] = ()
    """Modules with the kernels, on GPUs, of the operators that the pass makes."""
    in_cpp: ClassVar[bool] = False
    """Whether these operators have kernels in C++ on CPUs."""

    def __init_subclass__(cls) -> None:
        cls.name = cls.__module__.rpartition(".")[2]

    @property
    def applies(self) -> bool:
        """Whether the pass runs for the target: by default, whether the target has its kernel family."""
        return TABLE[self.family].on(self.target)

    @property
    def obstacle(self) -> str:
        """The reason why the kernels of the pass cannot be used here, or "". Read only if `applies`."""
        if self.in_cpp and self.target.device == "cpu":
            return kernel.obstacle()
        return optional.obstacle(*self.templates)

    def candidates(self, graph: fx.Graph) -> Iterable[fx.Node]:
        """Returns the products of `graph` whose records get the reason in `obstacle`."""
        del graph
        return ()

    @abstractmethod
    def apply(self, graph: fx.Graph) -> Reasons | None:
        """Transforms `graph`, a valid graph, into a valid graph. Returns reasons of skipped products, if any.

        The pipeline erases the dead code that it leaves.
        """


class NativePass(LoweringPass):
    """A pass for chips with an MX GEMM."""

    family = Family.MX
    templates = NATIVE
