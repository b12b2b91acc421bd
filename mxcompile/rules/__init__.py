"""A policy against the layers of a model: which rule decides for what, and what nearly happened."""

from mxcompile.rules.check import (
    check_layers,
    check_mistakes,
    complaints,
    mistakes,
    near_misses,
    unused_rules,
    with_complaints,
)
from mxcompile.rules.fit import RuleFit, fits
from mxcompile.rules.layers import folded, layers_of, spelled
from mxcompile.rules.shared import name_signature

__all__ = [
    "RuleFit",
    "check_layers",
    "check_mistakes",
    "complaints",
    "fits",
    "folded",
    "layers_of",
    "mistakes",
    "name_signature",
    "near_misses",
    "spelled",
    "unused_rules",
    "with_complaints",
]
