"""Blame: finds the layers and GEMMs that make the difference between two policies on a batch."""

from mxcompile.analysis.blame.blamed import MEASURES, Blamed, BlamedPart, Effect, Spread
from mxcompile.analysis.blame.measure import blame
from mxcompile.analysis.blame.search import check, check_different

__all__ = ["MEASURES", "Blamed", "BlamedPart", "Effect", "Spread", "blame", "check", "check_different"]
