"""Tuning: finds by measurement the policy that keeps most of a model quantized within an error bound."""

from mxcompile.analysis.tune.search import check_mix, tune
from mxcompile.analysis.tune.tuned import Bounds, Chosen, Tuned

__all__ = ["Bounds", "Chosen", "Tuned", "check_mix", "tune"]
