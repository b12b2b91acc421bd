"""The sources of values of the forward, and the marks of the way from a source to a value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from torch import fx


class Source(Enum):
    """The kind of a source of values."""

    LAYER = auto()
    ATTENTION = auto()  # softmax(q·kᵀ)·v, or the operator for it
    PRODUCT = auto()  # a product of two activations, but not an attention
    SCAN = auto()  # a cumulative sum or a recurrence over tokens
    CONVOLUTION = auto()
    OPAQUE = auto()
    STREAM = auto()
    TABLE = auto()
    INPUT = auto()
    CUT = auto()  # an input that the model computes elsewhere


ACTIVATED, GATED, SOFTMAXED, WHOLE, FILTERED, BESIDE, GROUP = 1, 2, 4, 8, 16, 32, 64
"""Marks of the way from a source. ACTIVATED: passes an activation. GATED: multiplied by another such value.
SOFTMAXED: passes a softmax. WHOLE: not reduced to a statistic or an element. FILTERED: passes a depthwise
convolution. BESIDE: concatenated with other features. GROUP: selected from several groups of features."""

Marks = dict[fx.Node, int]
"""Sources of a value, and the marks of the way from each source."""

BENT = ACTIVATED | GATED
"""Marks of nonlinear operators."""


@dataclass(kw_only=True, slots=True)
class Origins:
    """The sources of the values of a forward.

    of_value: sources of every value. kind: kind of every source.
    """

    of_value: dict[fx.Node, Marks] = field(default_factory=dict)
    kind: dict[fx.Node, Source] = field(default_factory=dict)

    def sources(self, origins: Marks, *kinds: Source) -> list[fx.Node]:
        """Returns the sources in `origins` that are of one of `kinds`."""
        return [source for source in origins if self.kind[source] in kinds]


def merged(values: Iterable[Marks]) -> Marks:
    """Returns the sources of several values together, each with all its marks."""
    result: Marks = {}
    for value in values:
        if not result:
            result = value
        elif value and value is not result:
            result = dict(result)
            for source, marks in value.items():
                result[source] = result.get(source, 0) | marks
    return result
