"""The random Hadamard transform.

    hadamard    x → its transform along a dimension, padded to whole blocks of 16

`formats.hadamard` is the reference.
"""

from __future__ import annotations

from torch import Tensor

from mxcompile.formats.hadamard import num_transformed, transformed
from mxcompile.ops.define import Spec, define


def _spec_hadamard(x: Tensor, dim: int, signs: int) -> list[Spec]:
    shape = list(x.shape)
    shape[dim] = num_transformed(shape[dim])
    return [(shape, x.dtype)]


hadamard = define("hadamard(Tensor x, int dim, int signs) -> Tensor", transformed, _spec_hadamard)
