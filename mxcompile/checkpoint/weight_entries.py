"""One weight of a checkpoint, by the names of its tensors in the files."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mxcompile.checkpoint.files import Entry
from mxcompile.errors import CheckpointError
from mxcompile.formats import num_blocks, stored_elem, stored_precision

E4M3, E2M1 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

SUFFIX = "_scale"
"""What follows the name of a weight in that of its scales."""

Kind = tuple[torch.dtype, torch.dtype] | None
"""Element and value dtype of a stored weight, None for other tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """One weight of a checkpoint.

    name: in the model. shape: of the values. elements, scales: names of its tensors in the files; scales is
    "" for a tensor that is not quantized. elem: dtype of the elements, of one that is. block_dim: negative.
    dtype: of the values, where the checkpoint says. turned: whether the files hold blocks of 16 bytes along
    the last dimension but one of the values.
    """

    name: str
    shape: tuple[int, ...]
    elements: str
    scales: str = ""
    elem: torch.dtype = E4M3
    block_dim: int = -1
    dtype: torch.dtype | None = None
    turned: bool = False


def stored_weight(
    name: str, entry: Entry, scale: Entry | None, elem: torch.dtype, dtype: torch.dtype | None = None
) -> Named:
    """The weight of these elements and scales. Blocks run along the dimension that the shapes say.

    Raises `CheckpointError` for parts that do not belong together.
    """
    what, label = f"{entry.file}: {entry.name!r}", stored_precision(stored_elem(elem)).label
    if scale is None:
        of = "packed" if stored_elem(elem).packed else "FP8"
        raise CheckpointError(f"{what} is {of} but {name + SUFFIX!r} is missing: not an {label} weight")
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise CheckpointError(f"{what} has scales of {scale.dtype}, not E8M0 bytes: not an {label} weight")
    for dim in range(-1, -len(entry.shape) - 1, -1):
        shape = list(entry.shape)
        shape[dim] *= stored_elem(elem).per_byte
        blocks = [*shape]
        blocks[dim] = num_blocks(shape[dim])
        if tuple(blocks) == scale.shape:
            return Named(
                name=name,
                shape=tuple(shape),
                elements=entry.name,
                scales=scale.name,
                elem=elem,
                block_dim=dim,
                dtype=dtype,
            )
    raise CheckpointError(f"{what} has shape {entry.shape}, which scales of {scale.shape} do not fit")


def as_it_is(entry: Entry) -> Named:
    """A tensor that is not quantized."""
    return Named(name=entry.name, shape=entry.shape, elements=entry.name)
