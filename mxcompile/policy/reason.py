"""Reasons for the precision of a GEMM: a code of a closed set and facts; all sentences are in this module."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Code(StrEnum):
    """The kinds of reasons. Programs compare codes; the sentences are for people."""

    RULE = "rule"
    LIMIT = "size limit"
    PRESET = "preset"
    PRESET_ROLE = "preset and role"
    PRESET_GEMM = "preset and gemm"
    SMALL_SIDE = "small side"
    ROLE = "role"
    OPAQUE = "opaque operator"
    UNCOUNTED = "unknown FLOPs"
    BODY = "inside operator"
    TANGENT = "tangent"
    CONVOLUTION = "convolution"
    BY_MODEL = "quantized by the model"
    NO_PARAMETER = "parameter outside"
    ARGUMENT = "weight is an argument"
    NOT_COMPILED = "not compiled"
    NO_PLAN = "no plan"
    OPERATOR = "operator"
    OPERAND = "operand"
    DTYPE = "dtype"
    DTYPES = "dtypes"
    LAYOUT = "layout"
    FACTORS = "factors"
    CUT = "part of a model"
    AUTOCAST_OFF = "autocast off"
    NO_HISTORY = "no history"
    NO_TRANSFORM = "no transform"
    NOT_SENT = "not sent"
    DEQUANTIZED = "dequantized"
    NOT_DEQUANTIZED = "not dequantized"
    WATCH = "watch"


_WORDS = {
    Code.RULE: "policy: rule {}",
    Code.LIMIT: "policy: {}",
    Code.PRESET: "preset {}",
    Code.PRESET_ROLE: "preset {}: role {}",
    Code.PRESET_GEMM: "preset {}: no {}",
    Code.SMALL_SIDE: "preset {}: a side under {} ({})",
    Code.ROLE: "role {}",
    Code.OPAQUE: "opaque operator {}",
    Code.UNCOUNTED: "opaque operator {}, unknown FLOPs",
    Code.BODY: "inside {}, whose graphs passes cannot rewrite",
    Code.TANGENT: "a product of a forward-mode derivative",
    Code.CONVOLUTION: "{}",
    Code.BY_MODEL: "quantized by the model",
    Code.NO_PARAMETER: "its weight is computed from a parameter outside of the graph",
    Code.ARGUMENT: "its weight is an argument of the call, not a parameter",
    Code.NOT_COMPILED: "outside the compiled graphs",
    Code.NO_PLAN: "no compiled graph reads its weight; it may run uncompiled",
    Code.OPERATOR: "unsupported operator {}",
    Code.OPERAND: "an operand of unknown shape and dtype",
    Code.DTYPE: "unsupported dtype {}: use FP32, BF16 or FP16",
    Code.DTYPES: "operands of two dtypes, {} and {}: PyTorch raises an error",
    Code.LAYOUT: "unsupported layout {}",
    Code.FACTORS: "alpha or beta is not a number",
    Code.AUTOCAST_OFF: "the model turns autocast off here",
    Code.CUT: "decided on a part of the model: {}",
    Code.NO_HISTORY: "scales of current tensors, no history: the weight is not a parameter of the graph",
    Code.NO_TRANSFORM: "no Hadamard transform: groups of tokens may end inside its blocks",
    Code.NOT_SENT: "ranks send its {} unquantized: {}",
    Code.DEQUANTIZED: "its {} is the dequantized operand of fprop",
    Code.NOT_DEQUANTIZED: "its {} is not quantized: fprop casts another tensor",
    Code.WATCH: "watch: {}",
}


class Reason(str):
    """A reason. Its string value is the sentence.

    code: kind of the reason. facts: values in the sentence, in order: ``Reason(Code.DTYPE, "int8")`` is
    "unsupported dtype int8: use FP32, BF16 or FP16".
    """

    __slots__ = ("code", "facts")

    code: Code
    facts: tuple[str, ...]

    def __new__(cls, code: Code, *facts: object, more: str = "") -> Self:  # noqa: D102
        words = tuple(map(str, facts))
        reason = super().__new__(cls, _WORDS[code].format(*words) + more)
        reason.code, reason.facts = code, words
        return reason

    def also(self, other: Reason) -> Reason:
        """Returns this reason with the sentence of `other` appended. Code and facts stay."""
        return Reason(self.code, *self.facts, more=f"{self._more()}; {other}")

    def _more(self) -> str:
        return self[len(_WORDS[self.code].format(*self.facts)) :]

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuilt, (self.code, self.facts, self._more())


def _rebuilt(code: Code, facts: tuple[str, ...], more: str) -> Reason:
    return Reason(code, *facts, more=more)
