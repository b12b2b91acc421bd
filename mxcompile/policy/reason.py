"""Reasons for the precision of a GEMM: a code of a closed set and facts; all sentences are in this module."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import Self


class Code(StrEnum):
    """The kinds of reasons. Programs compare codes; the sentences are for people.

    sentence: the sentence, with {} for each fact.
    """

    sentence: str

    def __new__(cls, word: str, sentence: str) -> Self:
        """Returns the code with the name `word` in reports."""
        code = str.__new__(cls, word)
        code._value_, code.sentence = word, sentence
        return code

    RULE = "rule", "policy: rule {}"
    LIMIT = "size limit", "policy: {}"
    PRESET = "preset", "preset {}"
    PRESET_ROLE = "preset and role", "preset {}: role {}"
    PRESET_GEMM = "preset and gemm", "preset {}: no {}"
    SMALL_SIDE = "small side", "preset {}: a side under {} ({})"
    ROLE = "role", "role {}"
    OPAQUE = "opaque operator", "opaque operator {}"
    UNCOUNTED = "unknown FLOPs", "opaque operator {}, unknown FLOPs"
    BODY = "inside operator", "inside {}, whose graphs passes cannot rewrite"
    TANGENT = "tangent", "a product of a forward-mode derivative"
    CONVOLUTION = "convolution", "{}"
    BY_MODEL = "quantized by the model", "quantized by the model"
    NO_PARAMETER = "parameter outside", "its weight is computed from a parameter outside of the graph"
    ARGUMENT = "weight is an argument", "its weight is an argument of the call, not a parameter"
    NOT_COMPILED = "not compiled", "outside the compiled graphs"
    NO_PLAN = "no plan", "no compiled graph reads its weight; it may run uncompiled"
    OPERATOR = "operator", "unsupported operator {}"
    OPERAND = "operand", "an operand of unknown shape and dtype"
    DTYPE = "dtype", "unsupported dtype {}: use FP32, BF16 or FP16"
    DTYPES = "dtypes", "operands of two dtypes, {} and {}: PyTorch raises an error"
    LAYOUT = "layout", "unsupported layout {}"
    FACTORS = "factors", "alpha or beta is not a number"
    CUT = "part of a model", "decided on a part of the model: {}"
    AUTOCAST_OFF = "autocast off", "the model turns autocast off here"
    NO_HISTORY = (
        "no history",
        "scales of current tensors, no history: the weight is not a parameter of the graph",
    )
    NO_TRANSFORM = "no transform", "no Hadamard transform: groups of tokens may end inside its blocks"
    NOT_SENT = "not sent", "ranks send its {} unquantized: {}"
    DEQUANTIZED = "dequantized", "its {} is the dequantized operand of fprop"
    NOT_DEQUANTIZED = "not dequantized", "its {} is not quantized: fprop casts another tensor"
    WATCH = "watch", "watch: {}"


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
        reason = super().__new__(cls, code.sentence.format(*words) + more)
        reason.code, reason.facts = code, words
        return reason

    def also(self, other: Reason) -> Reason:
        """Returns this reason with the sentence of `other` appended. Code and facts stay."""
        return Reason(self.code, *self.facts, more=f"{self._more()}; {other}")

    def _more(self) -> str:
        return self[len(self.code.sentence.format(*self.facts)) :]

    def __reduce__(self) -> tuple[object, ...]:
        return partial(Reason, more=self._more()), (self.code, *self.facts)
