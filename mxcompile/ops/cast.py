"""The cast: all that is made of a tensor, or of two that are computed from the same ones, from one read.

    cast    x → the tensors of its copies, then those of y        each copy given by its word (`Copy.of`)

seed, stream: of the random numbers of stochastic elements; `stream` tells apart the casts that share a seed.
scale: replaces the one that follows from the tensor, where it is known before (see `state`). amax: of the
tensor, FP32 [1], for formats of two levels (`largest`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mxcompile.formats import Copy
from mxcompile.ops.define import Spec, define


def _cast(
    x: Tensor,
    copies: Sequence[str],
    seed: Tensor | None = None,
    stream: int = 0,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    y: Tensor | None = None,
) -> list[Tensor]:
    known = seed, stream, scale, amax
    groups = (Copy.of(word).tensors(each, *known) for each in _sources(x, y) for word in copies)
    return [tensor for tensors in groups for tensor in tensors]


def _sources(x: Tensor, y: Tensor | None) -> list[Tensor]:
    return [x] if y is None else [x, y]


def _spec_cast(
    x: Tensor,
    copies: Sequence[str],
    seed: Tensor | None = None,
    stream: int = 0,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    y: Tensor | None = None,
) -> list[Spec]:
    return [spec for each in _sources(x, y) for word in copies for spec in Copy.of(word).specs(each)]


cast = define(
    "cast(Tensor x, str[] copies, Tensor? seed=None, int stream=0, Tensor? scale=None, Tensor? amax=None,"
    " Tensor? y=None) -> Tensor[]",
    _cast,
    _spec_cast,
)
