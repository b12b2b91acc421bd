"""The choice between two scales of a block of FP4: its largest magnitude becomes 6, or 4 ("4 over 6").

E2M1 has no value between 4 and 6, so a block whose largest magnitude becomes 6 rounds its next elements
coarsely. Under a scale that is 1.5 times larger, the largest magnitude becomes 4. A cast takes the scale with
the smaller error (see `two_level`).

Source: arXiv 2512.02010; Transformer Engine's recipe `NVFP4BlockScaling`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mxcompile.errors import FormatError, not_allowed

WORD = "4over6"
BOUNDS = (256, 448)
"""Largest scales of a block whose largest magnitude becomes 6. 256 leaves room for 1.5 times as much."""


class BlockError(StrEnum):
    """The measure of the error of a block: the sum of magnitudes, or of squares, of differences."""

    MAE = "mae"
    MSE = "mse"


@dataclass(frozen=True, kw_only=True, slots=True)
class FourOverSix:
    """The choice between two scales. bound: largest scale, of `BOUNDS`. error: measure of the error."""

    bound: int = BOUNDS[0]
    error: BlockError = BlockError.MAE

    def __str__(self) -> str:
        return f"{WORD}:{self.bound}:{self.error}"

    @classmethod
    def parse(cls, word: str) -> FourOverSix:
        """Parses a word such as "4over6:256:mae". Raises `FormatError` for other words."""
        choices = [cls(bound=bound, error=error) for bound in BOUNDS for error in BlockError]
        by_word = {str(choice): choice for choice in choices}
        if word not in by_word:
            raise FormatError(not_allowed("choice of scales", word, by_word))
        return by_word[word]
