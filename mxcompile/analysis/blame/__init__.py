"""Blame: finds the layers and GEMMs that make the difference between two policies on a batch."""

from mxcompile.analysis.blame.blamed import Blamed, BlamedPart
from mxcompile.analysis.blame.effects import MEASURES, Effect, Spread
from mxcompile.analysis.blame.measure import blame
from mxcompile.analysis.blame.plan import check, check_different

__all__ = ["MEASURES", "Blamed", "BlamedPart", "Effect", "Spread", "blame", "check", "check_different"]
