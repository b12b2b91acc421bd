"""Applies a policy to the layers of a model: the deciding rules, unused rules and near misses."""

from mxcompile.rules.check import (
    check_layers,
    check_mistakes,
    complaints,
    unused_rules,
    with_complaints,
)
from mxcompile.rules.fit import fits
from mxcompile.rules.layers import layers_of, spelled
from mxcompile.rules.shared import name_signature

__all__ = [
    "check_layers",
    "check_mistakes",
    "complaints",
    "fits",
    "layers_of",
    "name_signature",
    "spelled",
    "unused_rules",
    "with_complaints",
]
