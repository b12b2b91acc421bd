"""The error bounds of a tuning."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mxcompile.errors import ModelError, OptionError, shown
from mxcompile.report import Numerics


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The bounds; at least one must be set.

    min_sqnr: least SQNR of every quantized GEMM, in dB. max_loss_gap: largest relative difference of the loss
    from BF16's. Raises `OptionError` for invalid values.
    """

    min_sqnr: float | None = None
    max_loss_gap: float | None = None

    def __post_init__(self) -> None:
        if self.min_sqnr is None and self.max_loss_gap is None:
            raise OptionError("tune needs a bound: `min_sqnr` (in dB), `max_loss_gap` (a share), or both")
        if self.min_sqnr is not None and not (_is_number(self.min_sqnr) and math.isfinite(self.min_sqnr)):
            raise OptionError(f"`min_sqnr` must be a finite number of dB, found {shown(self.min_sqnr)}")
        if self.max_loss_gap is not None and not (
            _is_number(self.max_loss_gap) and 0 < self.max_loss_gap < math.inf
        ):
            raise OptionError(
                f"`max_loss_gap` must be a positive share (0.002 for 0.2 %), found {shown(self.max_loss_gap)}"
            )

    def allows_sqnr(self, sqnr_db: float) -> bool:
        """Whether a GEMM with this SQNR may stay quantized; False for NaN under a bound."""
        return self.min_sqnr is None or sqnr_db >= self.min_sqnr

    def allows_gap(self, gap: float | None) -> bool:
        """Whether the relative difference `gap` of the loss is allowed; False for NaN under a bound."""
        return self.max_loss_gap is None or (gap is not None and abs(gap) <= self.max_loss_gap)

    def check_loss(self, reference: float | None) -> None:
        """Raises `ModelError` if the loss is bounded and `reference`, the loss of the model, is None."""
        if self.max_loss_gap is not None and reference is None:
            raise ModelError(
                "`max_loss_gap` needs a loss: let the model return a scalar or an output with .loss;"
                " in Python, loss_fn can make one"
            )

    def allow(self, numerics: Numerics) -> bool:
        """Whether all measured errors are within the bounds."""
        return all(self.allows_sqnr(gemm.sqnr_db) for gemm in numerics.gemms) and self.allows_gap(
            numerics.loss_gap
        )

    def __str__(self) -> str:
        parts = []
        if self.min_sqnr is not None:
            parts.append(f"SQNR of every GEMM ≥ {self.min_sqnr:g} dB")
        if self.max_loss_gap is not None:
            parts.append(f"loss within {self.max_loss_gap:.3g} of BF16 ({self.max_loss_gap:.4%})")
        return ", ".join(parts)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
