"""The policy language as values: roles, rules and what they decide.

A policy is a preset and an ordered list of rules; for a layer the first rule that matches decides, and
where none does the preset. Nothing here reads files (see `parse`).
"""

from __future__ import annotations

import fnmatch
import functools
import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from mxcompile.formats import BLOCK, Choices, Operands, Precision
from mxcompile.policy.reason import Reason
from mxcompile.policy.roles import Role


class Gemm(StrEnum):
    """The three GEMMs of a linear layer: y = x·Wᵀ, dx = dy·W, dW = dyᵀ·x."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


class Saved(StrEnum):
    """The form in which a layer's input is kept for backward; MXFP8: also the tensors behind it."""

    COLUMNWISE = "columnwise"
    TRANSCODE = "transcode"
    BF16 = "bf16"
    MXFP8 = "mxfp8"


class Sent(StrEnum):
    """The form in which ranks exchange a layer's input and output gradient where no copy needs the source."""

    SOURCE = "source"
    MXFP8 = "mxfp8"


class Block(NamedTuple):
    """Where a layer lies in the depth of a model: in block `number`, from 0, of `total` repeated ones."""

    number: int
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A linear layer as a rule sees it; m, n and k are the sizes of its forward GEMM.

    name: full module path. module: class name of the module that runs it. m, n, k: None for a size that
    depends on data. block: where it lies among the repeated blocks of the model, None outside them.
    """

    name: str
    role: Role
    module: str
    m: int | None
    n: int | None
    k: int | None
    block: Block | None = None


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """A name pattern as a regular expression; both kinds are anchored at both ends."""
    expression = pattern.removeprefix("re:")
    return re.compile(expression if expression != pattern else fnmatch.translate(pattern))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ends:
    """The `first` and the `last` blocks of every stack of repeated blocks."""

    first: int = 0
    last: int = 0

    def hold(self, block: Block | None) -> bool:
        """Whether `block` is one of them."""
        return block is not None and (block.number < self.first or block.number >= block.total - self.last)


class Limit(NamedTuple):
    """One size limit of a rule and the size it is about: `key` is the rule's key, `letter` is m, n or k."""

    key: str
    letter: str
    limit: int
    size: int | None

    @property
    def kept(self) -> bool:
        """Whether the size is allowed. An unknown one is taken for large: no least size refuses it."""
        if self.size is None:
            return not self.upper
        return self.size <= self.limit if self.upper else self.size >= self.limit

    @property
    def upper(self) -> bool:
        """Whether the limit is the largest size allowed, not the least."""
        return self.key.startswith("max")

    def __str__(self) -> str:
        return f"{self.key} {self.limit} ({self.letter}={'?' if self.size is None else self.size})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """The condition of a rule: every field that is not empty, None or 0 must hold.

    name: globs (``*`` crosses dots) or ``re:`` expressions, anchored. role, module: any of. blocks: in the
    first or last repeated blocks. min_m to max_k: least and largest size of the forward GEMM.
    """

    name: tuple[str, ...] = ()
    role: tuple[Role, ...] = ()
    module: tuple[str, ...] = ()
    blocks: Ends | None = None
    min_m: int = 0
    min_n: int = 0
    min_k: int = 0
    max_m: int = 0
    max_n: int = 0
    max_k: int = 0

    def fits(self, layer: Layer) -> bool:
        """Whether everything but the sizes holds for `layer`."""
        return (
            self.places(layer.name, layer.block)
            and (not self.role or layer.role in self.role)
            and (not self.module or layer.module in self.module)
        )

    def names(self, name: str) -> bool:
        """Whether the name patterns, if there are any, allow `name`."""
        return not self.name or any(_compiled(pattern).fullmatch(name) for pattern in self.name)

    def places(self, name: str, block: Block | None) -> bool:
        """Whether all that is said about where a layer is holds for one called `name` in `block`."""
        return self.names(name) and (self.blocks is None or self.blocks.hold(block))

    def limits(self, layer: Layer) -> tuple[Limit, ...]:
        """Every size limit there is, with the size of `layer`."""
        every = (
            Limit(f"{end}_{letter}", letter, getattr(self, f"{end}_{letter}"), getattr(layer, letter))
            for end in ("min", "max")
            for letter in "mnk"
        )
        return tuple(limit for limit in every if limit.limit)

    def of_any_size(self) -> Match:
        """The same without size limits."""
        return replace(self, min_m=0, min_n=0, min_k=0, max_m=0, max_n=0, max_k=0)

    def missed(self, layer: Layer) -> Limit | None:
        """The first size limit that `layer` does not keep, or None."""
        return next((limit for limit in self.limits(layer) if not limit.kept), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Use(Choices):
    """The choices of a rule, by the keys of a policy; None leaves a choice to the preset."""

    fprop: Precision | None = None
    dgrad: Precision | None = None
    wgrad: Precision | None = None
    saved: Saved | None = None
    sent: Sent | None = None

    def wants(self, gemm: Gemm) -> Precision | None:
        """Returns the precision asked for `gemm`, or None."""
        return {Gemm.FPROP: self.fprop, Gemm.DGRAD: self.dgrad, Gemm.WGRAD: self.wgrad}[gemm]

    @property
    def quantizes(self) -> bool:
        """Whether operands of any GEMM are to be cast."""
        return any(row is not None and row.quantizes for row in (self.fprop, self.dgrad, self.wgrad))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """`use` for the layers `match` fits. kept: GEMMs that a watch has put into their own dtype, and why."""

    match: Match
    use: Use
    kept: tuple[tuple[Gemm, str], ...] = field(default=(), compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """The decision where no rule matches: which GEMMs of layers that presets quantize, and in which formats.

    least_side: of a weight; one with a smaller side is left alone.
    """

    name: str
    precision: Precision
    gemms: frozenset[Gemm] = frozenset(Gemm)
    formats: Choices = field(default_factory=Choices)
    least_side: int = BLOCK


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The word for the precision of one GEMM, and why. formats: of the layer's operands; None if not cast."""

    precision: str
    reason: Reason
    formats: Operands | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Everything decided for one linear layer."""

    fprop: Choice
    dgrad: Choice
    wgrad: Choice
    saved: Saved
    sent: Sent = Sent.SOURCE

    @classmethod
    def of(cls, choices: dict[str, Choice], use: Use) -> Decision:
        """The decision with a choice for each GEMM, and what else `use` says."""
        return cls(**choices, saved=use.saved or Saved.COLUMNWISE, sent=use.sent or Sent.SOURCE)

    def choice(self, gemm: Gemm) -> Choice:
        """The choice for `gemm`."""
        return {Gemm.FPROP: self.fprop, Gemm.DGRAD: self.dgrad, Gemm.WGRAD: self.wgrad}[gemm]
