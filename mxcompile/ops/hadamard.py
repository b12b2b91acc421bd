"""Operators of the random Hadamard transform.

    hadamard               x → its transform along a dimension, in whole blocks of 16
    hadamard_largest       x → its largest magnitude, and that of its transform along columns, [1] each

`formats.hadamard` is the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxcompile.formats.encoding import tensor_amax
from mxcompile.formats.hadamard import num_transformed, transformed
from mxcompile.ops.define import Spec, define


def _spec_hadamard(x: Tensor, dim: int, signs: int) -> list[Spec]:
    shape = list(x.shape)
    shape[dim] = num_transformed(shape[dim])
    return [(shape, x.dtype)]


def _largest(x: Tensor, signs: int) -> tuple[Tensor, Tensor]:
    return tensor_amax(x), tensor_amax(transformed(x, -2, signs))


def _spec_largest(*_: object) -> list[Spec]:
    return [((1,), torch.float32)] * 2


hadamard = define("hadamard(Tensor x, int dim, int signs) -> Tensor", transformed, _spec_hadamard)
hadamard_largest = define(
    "hadamard_largest(Tensor x, int signs) -> (Tensor plain, Tensor transformed)",
    _largest,
    _spec_largest,
)
