"""The policy language as values: roles, rules and what they decide.

A policy is a preset and an ordered list of rules; for a layer the first rule that matches decides, and
where none does the preset. Nothing here reads files (see `parse`).
"""

from __future__ import annotations

import fnmatch
import functools
import re
from dataclasses import dataclass
from enum import StrEnum

from mxcompile.formats import E4M3, ElemType, Format, Rounding, Tile


class Role(StrEnum):
    """What a matmul does in the model. Closed set."""

    QKV = "qkv"
    ATTN_OUT = "attn_out"
    FFN_IN = "ffn_in"
    FFN_OUT = "ffn_out"
    EXPERT_IN = "expert_in"
    EXPERT_OUT = "expert_out"
    ROUTER = "router"
    ATTN_SCORES = "attn_scores"
    ATTN_VALUES = "attn_values"
    EMBEDDING = "embedding"
    HEAD = "head"
    OTHER = "other"


ATTENTION_PRODUCTS = frozenset({Role.ATTN_SCORES, Role.ATTN_VALUES})


class Precision(StrEnum):
    """What a GEMM's operands are cast to; BF16 stands for "left as the model has it"."""

    MXFP8 = "mxfp8"
    BF16 = "bf16"


class Gemm(StrEnum):
    """The three GEMMs of a linear layer: y = x·Wᵀ, dx = dy·W, dW = dyᵀ·x."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


class Saved(StrEnum):
    """What of a layer's input is kept for wgrad."""

    COLUMNWISE = "columnwise"
    TRANSCODE = "transcode"
    BF16 = "bf16"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A linear layer as a rule sees it; m, n and k are those of its forward GEMM.

    name: full module path. module: class name of the module that runs it.
    """

    name: str
    role: Role
    module: str
    m: int
    n: int
    k: int


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """A name pattern as a regular expression; both kinds are anchored at both ends."""
    expression = pattern.removeprefix("re:")
    return re.compile(expression if expression != pattern else fnmatch.translate(pattern))


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """What a rule applies to: every field that is not empty or 0 must hold.

    name: globs (``*`` crosses dots) or ``re:`` expressions, anchored. role, module: any of. min_m, min_n,
    min_k: least size of the forward GEMM.
    """

    name: tuple[str, ...] = ()
    role: tuple[Role, ...] = ()
    module: tuple[str, ...] = ()
    min_m: int = 0
    min_n: int = 0
    min_k: int = 0

    def fits(self, layer: Layer) -> bool:
        """Whether everything but the sizes holds for `layer`."""
        return (
            self.names(layer.name)
            and (not self.role or layer.role in self.role)
            and (not self.module or layer.module in self.module)
        )

    def names(self, name: str) -> bool:
        """Whether the name patterns, if there are any, allow `name`."""
        return not self.name or any(_compiled(pattern).fullmatch(name) for pattern in self.name)

    def limits(self, layer: Layer) -> tuple[tuple[str, int, int], ...]:
        """Letter, limit and size of `layer` for every size limit there is."""
        every = (("m", self.min_m, layer.m), ("n", self.min_n, layer.n), ("k", self.min_k, layer.k))
        return tuple((key, limit, size) for key, limit, size in every if limit)

    def too_small(self, layer: Layer) -> str | None:
        """The first size limit `layer` misses, with the measured size, or None."""
        for key, limit, size in self.limits(layer):
            if size < limit:
                return f"min_{key} {limit} ({key}={size})"
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """What a rule asks for; None leaves a choice to the preset."""

    fprop: Precision | None = None
    dgrad: Precision | None = None
    wgrad: Precision | None = None
    elem_dtype: ElemType | None = None
    grad_dtype: ElemType | None = None
    rounding: Rounding | None = None
    weight_block: Tile | None = None
    saved: Saved | None = None

    def wants(self, gemm: Gemm) -> Precision | None:
        """What is asked for `gemm`."""
        match gemm:
            case Gemm.FPROP:
                return self.fprop
            case Gemm.DGRAD:
                return self.dgrad
            case Gemm.WGRAD:
                return self.wgrad

    @property
    def asks_mxfp8(self) -> bool:
        """Whether any GEMM is sent to MXFP8."""
        return Precision.MXFP8 in (self.fprop, self.dgrad, self.wgrad)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """`use` for the layers `match` fits."""

    match: Match
    use: Use


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """What decides where no rule does: which GEMMs of which roles, in which formats."""

    name: str
    gemms: frozenset[Gemm] = frozenset(Gemm)
    roles: frozenset[Role] = frozenset(
        {
            Role.QKV,
            Role.ATTN_OUT,
            Role.FFN_IN,
            Role.FFN_OUT,
            Role.EXPERT_IN,
            Role.EXPERT_OUT,
        }
    )
    elem: ElemType = E4M3
    grad_elem: ElemType = E4M3
    rounding: Rounding = Rounding.RCEIL


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Precision of one GEMM and why."""

    precision: Precision
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Everything decided for one linear layer.

    x, w, dy: formats of its input, weight and output gradient, for the GEMMs in MXFP8.
    """

    fprop: Choice
    dgrad: Choice
    wgrad: Choice
    x: Format
    w: Format
    dy: Format
    saved: Saved

    def choice(self, gemm: Gemm) -> Choice:
        """The choice for `gemm`."""
        match gemm:
            case Gemm.FPROP:
                return self.fprop
            case Gemm.DGRAD:
                return self.dgrad
            case Gemm.WGRAD:
                return self.wgrad
