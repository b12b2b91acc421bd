"""A policy against the layers of a model: which rule decides for what, and what nearly happened."""

from mxcompile.rules.check import (
    check_mistakes,
    check_rules,
    complaints,
    mistakes,
    near_misses,
    unused_rules,
    with_complaints,
)
from mxcompile.rules.fit import RuleFit, fits
from mxcompile.rules.layers import folded, layers_of
from mxcompile.rules.shared import name_signature, shared_code

__all__ = [
    "RuleFit",
    "check_mistakes",
    "check_rules",
    "complaints",
    "fits",
    "folded",
    "layers_of",
    "mistakes",
    "name_signature",
    "near_misses",
    "shared_code",
    "unused_rules",
    "with_complaints",
]
