"""Weights of a checkpoint, assembled from the tensors in its files."""

from __future__ import annotations

import torch

from mxcompile.checkpoint.files import Entry
from mxcompile.errors import CheckpointError
from mxcompile.formats import TWO_LEVEL, Format, num_blocks, stored_form, stored_precision
from mxcompile.storage.weights import StoredWeight

E4M3, E2M1 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

MXFP8, MXFP8_E5M2, MXFP4 = stored_form(E4M3), stored_form(torch.float8_e5m2), stored_form(E2M1)
MXINT8 = stored_form(torch.int8)
NVFP4 = stored_form(E2M1, TWO_LEVEL)

SUFFIX = "_scale"
"""Suffix of the name of a scale tensor."""


def stored_weight(
    name: str,
    entry: Entry,
    scale: Entry | None,
    form: Format,
    dtype: torch.dtype | None = None,
    global_scale: Entry | None = None,
) -> StoredWeight:
    """Returns the weight that a file stores in several tensors, with the blocked dimension from their shapes.

    Args:
        name: Name of the weight.
        entry: Its elements.
        scale: Its scales; None if the file lacks them.
        form: Its format.
        dtype: Dtype of the values, if the checkpoint contains it.
        global_scale: Its global scale, if the file has one.

    Raises:
        CheckpointError: The tensors are inconsistent.
    """
    what, label = f"{entry.file}: {entry.name!r}", stored_precision(form).label
    if scale is None:
        of = "packed" if form.elem.packed else "FP8"
        raise CheckpointError(f"{what} is {of} but {name + SUFFIX!r} is missing: not an {label} weight")
    if scale.dtype not in {form.scale.dtype, form.scale.stored_dtype}:
        wanted = "E4M3" if form.two_level else "E8M0 bytes"
        raise CheckpointError(f"{what} has scales of {scale.dtype}, not {wanted}: not an {label} weight")
    _check_global(global_scale, form, what)
    for dim in range(-1, -len(entry.shape) - 1, -1):
        shape = list(entry.shape)
        shape[dim] *= form.elem.per_byte
        blocks = [*shape]
        blocks[dim] = num_blocks(shape[dim], form.tile.along)
        if tuple(blocks) == scale.shape:
            parts = [entry, scale] if global_scale is None else [entry, scale, global_scale]
            return StoredWeight(
                name=name,
                shape=tuple(shape),
                dtype=dtype,
                form=form,
                block_dim=dim,
                tensors=tuple(part.name for part in parts),
            )
    raise CheckpointError(f"{what} has shape {entry.shape}, which scales of {scale.shape} do not fit")


def _check_global(global_scale: Entry | None, form: Format, what: str) -> None:
    """Raises `CheckpointError` if a weight in `form` lacks its global scale; what: name for the message."""
    if not form.two_level:
        return
    if global_scale is None:
        raise CheckpointError(f"{what} has E4M3 scales but no global scale: not an NVFP4 weight")
    if global_scale.dtype is not torch.float32 or torch.Size(global_scale.shape).numel() != 1:
        raise CheckpointError(
            f"{what}: {global_scale.name!r} is {global_scale.dtype} of shape {global_scale.shape}, not one"
            " FP32 number: not an NVFP4 weight"
        )


def plain_weight(entry: Entry, *, is_read: bool = True) -> StoredWeight:
    """Returns the weight of an unquantized tensor. is_read: whether the model has a parameter for it."""
    return StoredWeight(
        name=entry.name, shape=entry.shape, dtype=entry.dtype, tensors=(entry.name,), is_read=is_read
    )
