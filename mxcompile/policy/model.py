"""The data model of the policy language: layers, rules and decisions.

A policy is a preset and an ordered list of rules. The first rule that matches a layer decides, else the
preset. This module reads no files (see `parse`).
"""

from __future__ import annotations

import fnmatch
import functools
import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from mxcompile.formats import UNQUANTIZED, Choices, Operands, Precision
from mxcompile.policy.reason import Reason
from mxcompile.policy.roles import Role


class Gemm(StrEnum):
    """The three GEMMs of a linear layer: y = x·Wᵀ, dx = dy·W, dW = dyᵀ·x."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


class Saved(StrEnum):
    """The form in which forward saves a layer's input; MXFP8 also covers the sources of the input."""

    COLUMNWISE = "columnwise"
    TRANSCODE = "transcode"
    BF16 = "bf16"
    MXFP8 = "mxfp8"


class Sent(StrEnum):
    """The form in which ranks send x and dy of a layer if only casts along their features read them."""

    SOURCE = "source"
    MXFP8 = "mxfp8"


class Backward(StrEnum):
    """The operands of dgrad and wgrad: quantized, or the operands of fprop in the model's dtype."""

    QUANTIZED = "quantized"
    DEQUANTIZED = "dequantized"


class Block(NamedTuple):
    """The position of a layer in the depth of a model: block `number` (from 0) of `total` repeated blocks."""

    number: int
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A linear layer, the subject of a rule.

    name: full module path. module: class name of the module that runs it. m, n, k: sizes of the forward GEMM,
    None if they depend on data. block: position among the repeated blocks of the model, None outside them.
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
    """Returns a glob or ``re:`` pattern as a regular expression, to be used with `fullmatch`."""
    expression = pattern.removeprefix("re:")
    return re.compile(expression if expression != pattern else fnmatch.translate(pattern))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ends:
    """The `first` and the `last` blocks of every stack of repeated blocks."""

    first: int = 0
    last: int = 0

    def contains(self, block: Block | None) -> bool:
        """Whether `block` is among these blocks."""
        return block is not None and (block.number < self.first or block.number >= block.total - self.last)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRange:
    """A range of training steps, from `start` up to and excluding `stop`; without an end if `stop` is None.

    is_now: whether the range includes the step that a policy decides for (see `Policy.at`).
    """

    start: int = 0
    stop: int | None = None
    is_now: bool = False

    def contains(self, step: int) -> bool:
        """Whether the range includes `step`."""
        return self.start <= step and (self.stop is None or step < self.stop)

    def within(self, other: StepRange) -> bool:
        """Whether `other` includes the whole range."""
        ends = other.stop is None or (self.stop is not None and self.stop <= other.stop)
        return other.start <= self.start and ends

    def __str__(self) -> str:
        if self.stop is None:
            return f"from step {self.start:,}"
        last = self.stop - 1
        return f"step {last:,}" if self.start == last else f"steps {self.start:,} to {last:,}"


class Limit(NamedTuple):
    """One size limit of a rule and the size of the layer. key: the rule's key, which ends in m, n or k."""

    key: str
    limit: int
    size: int | None

    @property
    def is_satisfied(self) -> bool:
        """Whether the size is allowed. An unknown size counts as large: it passes minimums, not maximums."""
        if self.size is None:
            return not self.upper
        return self.size <= self.limit if self.upper else self.size >= self.limit

    @property
    def upper(self) -> bool:
        """Whether the limit is a maximum."""
        return self.key.startswith("max")

    def __str__(self) -> str:
        return f"{self.key} {self.limit} ({self.key[-1]}={'?' if self.size is None else self.size})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """The condition of a rule: every field that is not empty, None or 0 must match.

    name: globs (``*`` crosses dots) or ``re:`` expressions, anchored at both ends. role, module:
    alternatives. blocks: the first or last repeated blocks. steps: training steps. min_m to max_k: limits of
    the sizes of the forward GEMM.
    """

    name: tuple[str, ...] = ()
    role: tuple[Role, ...] = ()
    module: tuple[str, ...] = ()
    blocks: Ends | None = None
    steps: StepRange | None = None
    min_m: int = 0
    min_n: int = 0
    min_k: int = 0
    max_m: int = 0
    max_n: int = 0
    max_k: int = 0

    def fits(self, layer: Layer) -> bool:
        """Whether `layer` matches, apart from its sizes."""
        return (
            self.in_force
            and self.places(layer.name, layer.block)
            and (not self.role or layer.role in self.role)
            and (not self.module or layer.module in self.module)
        )

    def names(self, name: str) -> bool:
        """Whether a name pattern matches `name`, or there are no patterns."""
        return not self.name or any(_compiled(pattern).fullmatch(name) for pattern in self.name)

    def places(self, name: str, block: Block | None) -> bool:
        """Whether the conditions on name and block match."""
        return self.names(name) and (self.blocks is None or self.blocks.contains(block))

    def limits(self, layer: Layer) -> tuple[Limit, ...]:
        """Returns every size limit of the rule with the size of `layer`."""
        every = (
            Limit(f"{end}_{letter}", getattr(self, f"{end}_{letter}"), getattr(layer, letter))
            for end in ("min", "max")
            for letter in "mnk"
        )
        return tuple(limit for limit in every if limit.limit)

    @property
    def in_force(self) -> bool:
        """Whether `steps` includes the step that the policy decides for; True without `steps`."""
        return self.steps is None or self.steps.is_now

    def at(self, step: int) -> Match:
        """Returns the condition for training step `step`."""
        if self.steps is None:
            return self
        return replace(self, steps=replace(self.steps, is_now=self.steps.contains(step)))

    def of_any_size(self) -> Match:
        """Returns the condition without size limits."""
        return replace(self, min_m=0, min_n=0, min_k=0, max_m=0, max_n=0, max_k=0)

    def missed(self, layer: Layer) -> Limit | None:
        """Returns the first size limit that `layer` violates, or None."""
        return next((limit for limit in self.limits(layer) if not limit.is_satisfied), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Use(Choices):
    """The choices of a rule, by policy key. None leaves a choice to the preset."""

    fprop: Precision | None = None
    dgrad: Precision | None = None
    wgrad: Precision | None = None
    saved: Saved | None = None
    sent: Sent | None = None
    backward: Backward | None = None

    def wants(self, gemm: Gemm) -> Precision | None:
        """Returns the precision that the rule chooses for `gemm`, or None to leave it to the preset."""
        if self.backward is Backward.DEQUANTIZED and gemm is not Gemm.FPROP:
            return UNQUANTIZED
        return {Gemm.FPROP: self.fprop, Gemm.DGRAD: self.dgrad, Gemm.WGRAD: self.wgrad}[gemm]

    @property
    def quantizes(self) -> bool:
        """Whether the rule quantizes any GEMM."""
        return any(row is not None and row.quantizes for row in (self.fprop, self.dgrad, self.wgrad))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Applies `use` to layers that fit `match`.

    kept: GEMMs that a watch left unquantized, with the reason.
    """

    match: Match
    use: Use
    kept: tuple[tuple[Gemm, str], ...] = field(default=(), compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """The decision for layers without a matching rule: the quantized GEMMs and their formats."""

    name: str
    precision: Precision
    gemms: frozenset[Gemm] = frozenset(Gemm)
    formats: Choices = field(default_factory=Choices)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The precision of one GEMM and its reason. formats: formats of the operands, None if not quantized."""

    precision: str
    reason: Reason
    formats: Operands | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The decision for one linear layer."""

    fprop: Choice
    dgrad: Choice
    wgrad: Choice
    saved: Saved
    sent: Sent
    backward: Backward

    @classmethod
    def from_choices(cls, choices: dict[str, Choice], use: Use) -> Decision:
        """Returns a decision with `choices` by GEMM; the fields saved, sent and backward come from `use`."""
        return cls(
            **choices,
            saved=use.saved or Saved.COLUMNWISE,
            sent=use.sent or Sent.SOURCE,
            backward=use.backward or Backward.QUANTIZED,
        )

    def choice(self, gemm: Gemm) -> Choice:
        """Returns the choice for `gemm`."""
        return {Gemm.FPROP: self.fprop, Gemm.DGRAD: self.dgrad, Gemm.WGRAD: self.wgrad}[gemm]
