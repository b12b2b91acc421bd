"""Convolutions as matrix products: sizes, descriptions, and which of them are linear layers.

    y[n·o, Co/g] = patches(x)[n·o, Ci/g·|K|] · w[Co/g, Ci/g·|K|]ᵀ    for each of g groups, o pixels

A pointwise convolution (kernel 1, stride 1, no padding, one group) has no patches: it is a linear layer along
the channels of every pixel.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, fx

from mxcompile.graph.opsets import CONVOLUTION_BACKWARD, gradient_index, packet
from mxcompile.graph.tags import UNKNOWN, Sizes, tensor
from mxcompile.ops.view import arguments_of

_SETTINGS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


def _parts(node: fx.Node) -> tuple[Tensor | None, Tensor | None, Tensor | None, tuple[Any, ...]]:
    """Returns input, weight, result (in backward its gradient) and the values of `_SETTINGS`."""
    named = arguments_of(node)
    result = named["grad_output"] if packet(node) in CONVOLUTION_BACKWARD else node
    return tensor(named["input"]), tensor(named["weight"]), tensor(result), tuple(map(named.get, _SETTINGS))


def convolution_sizes(node: fx.Node) -> Sizes:
    """Returns the sizes of a convolution as a product; in backward, of the gradient that `node` computes."""
    x, w, y, (_, _, _, transposed, _, groups) = _parts(node)
    if x is None or w is None or y is None:
        return UNKNOWN
    taps = math.prod(w.shape[2:])
    if transposed:  # every input pixel contributes a patch of the output
        m, n, k = x.shape[0] * math.prod(x.shape[2:]), w.shape[1] * taps, w.shape[0] // groups
    else:
        m, n, k = y.shape[0] * math.prod(y.shape[2:]), w.shape[0] // groups, w.shape[1] * taps
    if packet(node) not in CONVOLUTION_BACKWARD:
        return groups, m, n, k
    return (groups, m, k, n) if gradient_index(node) == 0 else (groups, n, k, m)


def is_pointwise(node: fx.Node) -> bool:
    """Whether the convolution `node`, forward or backward, is a linear layer along the channels."""
    _, w, _, (stride, padding, _, transposed, output_padding, groups) = _parts(node)
    if w is None or transposed or groups != 1:
        return False
    ones, zeros = (*w.shape[2:], *stride), (*padding, *output_padding)
    return all(_is(1, size) for size in ones) and all(_is(0, size) for size in zeros)


def convolution_words(node: fx.Node) -> str:
    """Returns a description such as ``convolution 3×3, stride 2, 32 groups``."""
    _, w, _, (stride, _, _, transposed, _, groups) = _parts(node)
    kernel = "×".join(str(size) for size in w.shape[2:]) if w is not None else "?"
    words = [f"{'transposed ' if transposed else ''}convolution {kernel}"]
    if any(step != 1 for step in stride):
        words.append(f"stride {'×'.join(map(str, dict.fromkeys(stride)))}")
    if groups != 1:
        words.append(f"{groups} groups")
    return ", ".join(words)


def _is(wanted: int, size: Any) -> bool:
    return isinstance(size, int) and size == wanted
