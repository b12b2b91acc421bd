"""One weight of a checkpoint, by the names of its tensors in the files."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mxcompile.checkpoint.files import Entry
from mxcompile.errors import CheckpointError
from mxcompile.formats import TWO_LEVEL, Format, num_blocks, stored_form, stored_precision

E4M3, E2M1 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

MXFP8, MXFP8_E5M2, MXFP4 = stored_form(E4M3), stored_form(torch.float8_e5m2), stored_form(E2M1)
NVFP4 = stored_form(E2M1, TWO_LEVEL)

SUFFIX = "_scale"
"""What follows the name of a weight in that of its scales."""

Kind = tuple[Format, torch.dtype] | None
"""Format and value dtype of a stored weight, None for other tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """One weight of a checkpoint.

    name: in the model. shape: of the values. elements, scales, global_scale: names of its tensors in the
    files; scales is "" for a tensor that is not quantized, global_scale for one without two levels. form: of
    one that is quantized. block_dim: negative. dtype: of the values, where the checkpoint says. turned:
    whether the files hold blocks of 16 bytes along the last dimension but one of the values. ignored: whether
    the model has no place for it, so that it stays unread.
    """

    name: str
    shape: tuple[int, ...]
    elements: str
    scales: str = ""
    global_scale: str = ""
    form: Format = MXFP8
    block_dim: int = -1
    dtype: torch.dtype | None = None
    turned: bool = False
    ignored: bool = False

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of its tensors in the files."""
        return tuple(filter(None, (self.elements, self.scales, self.global_scale)))


def stored_weight(
    name: str,
    entry: Entry,
    scale: Entry | None,
    form: Format,
    dtype: torch.dtype | None = None,
    global_scale: Entry | None = None,
) -> Named:
    """The weight of these tensors. Blocks run along the dimension that the shapes say.

    Raises `CheckpointError` for parts that do not belong together.
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
            return Named(
                name=name,
                shape=tuple(shape),
                elements=entry.name,
                scales=scale.name,
                global_scale="" if global_scale is None else global_scale.name,
                form=form,
                block_dim=dim,
                dtype=dtype,
            )
    raise CheckpointError(f"{what} has shape {entry.shape}, which scales of {scale.shape} do not fit")


def _check_global(global_scale: Entry | None, form: Format, what: str) -> None:
    """Raises `CheckpointError` if a weight in `form`, which `what` names, lacks the global scale it needs."""
    if not form.two_level:
        return
    if global_scale is None:
        raise CheckpointError(f"{what} has E4M3 scales but no global scale: not an NVFP4 weight")
    if global_scale.dtype is not torch.float32 or torch.Size(global_scale.shape).numel() != 1:
        raise CheckpointError(
            f"{what}: {global_scale.name!r} is {global_scale.dtype} of shape {global_scale.shape}, not one"
            " FP32 number: not an NVFP4 weight"
        )


def ignored(entry: Entry) -> Named:
    """A tensor that is not read."""
    return Named(name=entry.name, shape=entry.shape, elements=entry.name, ignored=True)


def as_it_is(entry: Entry) -> Named:
    """A tensor that is not quantized."""
    return Named(name=entry.name, shape=entry.shape, elements=entry.name)
