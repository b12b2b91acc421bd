"""The value from which the scale of a tile is derived: its amax, or a substitute for it.

    max          the amax: the largest magnitude in the tile
    percentile   the smallest magnitude that at least `value` percent of the tile's elements do not exceed
    delayed      2^margin · the largest amax of the last `history` calls; does not depend on the tensor
    ema          decay · mean + (1 − decay) · amax: an exponential moving average over calls

Every kind but `max` can leave elements beyond the range of the scale; they saturate. `delayed` and `ema` have
one scale per tensor and keep state from call to call: one or more FP32 numbers for each operand of a layer. A
state of zeros means that there was no call yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mxcompile.errors import FormatError, not_allowed


class AmaxKind(StrEnum):
    """The rules for the value from which a scale is derived."""

    MAX = "max"
    PERCENTILE = "percentile"
    DELAYED = "delayed"
    EMA = "ema"


@dataclass(frozen=True, kw_only=True, slots=True)
class Amax:
    """The value from which a scale is derived.

    kind: rule. value: percentage, history length or decay, by kind. margin: exponent of the factor 2^margin,
    for `delayed` only.
    """

    kind: AmaxKind = AmaxKind.MAX
    value: float = 0.0
    margin: int = 0

    def __str__(self) -> str:
        if self.kind is AmaxKind.MAX:
            return str(self.kind)
        margin = f":{self.margin}" if self.kind is AmaxKind.DELAYED else ""
        return f"{self.kind}:{self.value:g}{margin}"

    @classmethod
    def parse(cls, word: str) -> Amax:
        """Parses a word such as "percentile:99.9" or "delayed:16:0". Raises `FormatError` for other words."""
        kind, *numbers = word.split(":")
        if kind not in list(AmaxKind):
            raise FormatError(not_allowed("amax", kind, list(AmaxKind)))
        try:
            value, margin = (*map(float, numbers), 0.0, 0.0)[:2]
        except ValueError:
            raise FormatError(f"amax {word!r}: expected numbers after {kind}, found {numbers}") from None
        return cls(kind=AmaxKind(kind), value=value, margin=int(margin))

    @property
    def stateful(self) -> bool:
        """Whether it keeps state from call to call."""
        return self.kind in (AmaxKind.DELAYED, AmaxKind.EMA)

    @property
    def history(self) -> int:
        """Length of an operand's state: the history length of `delayed`, 1 for `ema`, 0 without state."""
        return int(self.value) if self.kind is AmaxKind.DELAYED else int(self.stateful)


MAX = Amax()
