"""Scaled matmul on tiled scales: the algebra of ``scaled_mm``, whose reference reads either layout."""

from mxcompile.lowering.reference.scaled_mm import scaled_mm as scaled_mm_tiled

__all__ = ["scaled_mm_tiled"]
