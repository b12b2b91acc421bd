"""Tuning: the policy that keeps most in MXFP8 within a bound on its error, by measurement."""

from mxcompile.analysis.tune.bounds import Bounds
from mxcompile.analysis.tune.search import check_mix, tune
from mxcompile.analysis.tune.tuned import Chosen, Tuned

__all__ = ["Bounds", "Chosen", "Tuned", "check_mix", "tune"]
