"""The value from which a tile's scale is derived, in place of its largest magnitude.

    max          the largest magnitude itself
    percentile   the magnitude that so many percent of the tile do not exceed
    delayed      the largest of the last `history` calls, times 2^margin: known before the tensor is
    ema          an exponential mean over calls: decay · mean + (1 − decay) · the largest magnitude

All but the first leave elements that the scale does not reach, which saturate. The last two are of whole
tensors and carry state from call to call, one FP32 number or more for each operand of a layer; a state of
zeros says that there was no call yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mxcompile.errors import FormatError, not_allowed


class AmaxKind(StrEnum):
    """The kinds of a magnitude that a scale follows from."""

    MAX = "max"
    PERCENTILE = "percentile"
    DELAYED = "delayed"
    EMA = "ema"


@dataclass(frozen=True, kw_only=True, slots=True)
class Amax:
    """kind: which. value: the percentage, the length of the history, the decay. margin: of `delayed`."""

    kind: AmaxKind = AmaxKind.MAX
    value: float = 0.0
    margin: int = 0

    def __str__(self) -> str:
        if self.kind is AmaxKind.MAX:
            return str(self.kind)
        margin = f":{self.margin}" if self.kind is AmaxKind.DELAYED else ""
        return f"{self.kind}:{self.value:g}{margin}"

    @classmethod
    def of(cls, word: str) -> Amax:
        """The one written `word`; `FormatError` if none is."""
        kind, *numbers = word.split(":")
        if kind not in list(AmaxKind):
            raise FormatError(not_allowed("amax", kind, list(AmaxKind)))
        value, margin = (*map(float, numbers), 0.0, 0.0)[:2]
        return cls(kind=AmaxKind(kind), value=value, margin=int(margin))

    @property
    def stateful(self) -> bool:
        """Whether it carries state from call to call."""
        return self.kind in (AmaxKind.DELAYED, AmaxKind.EMA)

    @property
    def history(self) -> int:
        """How many numbers an operand's state has."""
        return int(self.value) if self.kind is AmaxKind.DELAYED else int(self.stateful)


MAX = Amax()
