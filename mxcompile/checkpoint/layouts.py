"""How stored weights lie in a checkpoint, in the layouts of others: one module for each.

All hold whole blocks along their last dimension alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxcompile.checkpoint import compressed_tensors, gpt_oss, torchao
from mxcompile.checkpoint.files import Checkpoint
from mxcompile.checkpoint.weight_entries import MXFP4, MXFP8, MXFP8_E5M2, NVFP4, Kind, Named
from mxcompile.errors import CheckpointError, not_allowed
from mxcompile.formats import Format, stored_precision
from mxcompile.storage import MXTensor

log = logging.getLogger(__name__)

COMPRESSED_TENSORS, TORCHAO, GPT_OSS = "compressed-tensors", "torchao", "gpt-oss"
NO_LAYOUT = "none"
"""The layout of a checkpoint without a stored weight."""

Parts = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileLayout:
    """How files hold stored weights.

    forms: formats that they can have. of_modules: whether a weight has to belong to a module. parts: from the
    name of a weight and its format to the names of its elements and scales, and of its global scale if it has
    one. scale_dtype: of E8M0 scales, of one byte. metadata: of a file, from the kinds of its tensors. config:
    the quantization_config of a config.json, from the modules that are left as they are and the formats of
    the others; None without one. mark: the key of a file's metadata that tells the layout; "" for that of
    files without a mark. read: the weights of such a checkpoint, checked.
    """

    name: str
    forms: tuple[Format, ...]
    of_modules: bool = False
    parts: Callable[[str, Format], tuple[str, ...]]
    scale_dtype: torch.dtype
    metadata: Callable[[Mapping[str, Kind]], dict[str, str]]
    config: Callable[[Iterable[str], Mapping[str, Format]], dict[str, Any]] | None = None
    mark: str = ""
    read: Callable[[Checkpoint], Iterator[Named]]

    def obstacle(self, name: str, shape: tuple[int, ...], block_dim: int, form: Format) -> str:
        """Why the layout cannot hold a weight stored so, "" if it can."""
        if block_dim not in (-1, len(shape) - 1):
            return f"{self.name} has blocks along the last dimension only"
        if form.stored not in self.forms:
            return f"{self.name} has {_listed(self.forms)} only"
        if shape[-1] % form.tile.along:
            return f"{self.name} has whole blocks of {form.tile.along} only (k={shape[-1]})"
        if self.of_modules and "." not in name:
            return f"{self.name} names weights of modules only"
        return ""

    def pack(self, name: str, x: MXTensor) -> Parts:
        """The tensors of a file for the weight `x`. Raises `CheckpointError` if the layout cannot hold it."""
        reason = self.obstacle(name, tuple(x.shape), x.block_dim, x.form)
        if reason:
            raise CheckpointError(
                f"{name}: {reason}; quantize_weights_ can leave it as it is by a policy rule"
            )
        scale = x.scale if x.form.two_level else x.scale.view(self.scale_dtype)
        tensors = [x.qdata.contiguous(), scale.contiguous()]
        if x.global_scale is not None:
            tensors.append(_one_number(name, x.global_scale))
        return dict(zip(self.parts(name, x.form), tensors, strict=True))


def _listed(forms: Iterable[Format]) -> str:
    *names, last = (f"{stored_precision(form).label} {form.elem}" for form in forms)
    return f"{', '.join(names)} and {last}"


def _one_number(name: str, global_scale: Tensor) -> Tensor:
    """`global_scale` as a file holds it, [1]. Raises `CheckpointError` where it is several numbers."""
    numbers = global_scale.reshape(-1)
    if not numbers.is_meta and not torch.equal(numbers, numbers[:1].expand_as(numbers)):
        raise CheckpointError(
            f"{name}: its rows have {len(numbers.unique())} scales of the tensor, of which a file holds one"
        )
    return numbers[:1].contiguous()


def layout_of(name: str) -> FileLayout:
    """The layout called `name`, or a `CheckpointError` that lists those there are."""
    if name not in LAYOUTS:
        raise CheckpointError(not_allowed("layout", name, LAYOUTS))
    return LAYOUTS[name]


def stored(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """The weights of `checkpoint` by name, each as a function that reads it: an `MXTensor` or as it is.

    dtype: of the values, where the checkpoint does not say. Every pair of elements and scales is checked
    before anything is read. Raises `CheckpointError`.
    """
    weights = named(checkpoint)[1]
    if unread := sum(weight.ignored for weight in weights):
        log.warning(
            "%s: %d scales of activations are not read: a policy says how activations are cast, by their own"
            " largest magnitude",
            checkpoint.path,
            unread,
        )
    return {weight.name: _reader(checkpoint, weight, dtype) for weight in weights if not weight.ignored}


def named(checkpoint: Checkpoint) -> tuple[str, list[Named]]:
    """The layout of the stored weights of `checkpoint`, "none" if it has none; all its weights, checked."""
    if any(gpt_oss.is_blocks(entry) for entry in checkpoint.entries.values()):
        return GPT_OSS, [*gpt_oss.read(checkpoint)]
    marks = {key for metadata in checkpoint.metadata for key in metadata} | {""}
    layout = next(layout for layout in reversed(LAYOUTS.values()) if layout.mark in marks)
    weights = [*layout.read(checkpoint)]
    return layout.name if any(weight.scales for weight in weights) else NO_LAYOUT, weights


def _reader(checkpoint: Checkpoint, weight: Named, dtype: torch.dtype) -> Callable[[], Tensor]:
    def read() -> Tensor:
        elements = checkpoint.read(weight.elements)
        if not weight.scales:
            return elements
        elements = elements.flatten(-2) if weight.turned else elements
        scales = checkpoint.read(weight.scales).view(weight.form.scale.stored_dtype)
        whole = _global_scale(checkpoint, weight.global_scale) if weight.global_scale else None
        elem, dim = weight.form.stored_dtype, weight.block_dim
        value = MXTensor(elements.view(elem), scales, dim, weight.dtype or dtype, whole)
        return value.transpose(-1, -2) if weight.turned else value

    return read


def _global_scale(checkpoint: Checkpoint, name: str) -> Tensor:
    """The global scale called `name`. Raises `CheckpointError` for one that no value can be divided by."""
    whole = checkpoint.read(name)
    if not (whole.isfinite() & (whole > 0)).all():
        file = checkpoint.entries[name].file
        raise CheckpointError(
            f"{file}: {name!r} is {whole.item()}, not a positive number: not an NVFP4 weight"
        )
    return whole


LAYOUTS = {
    layout.name: layout
    for layout in (
        FileLayout(
            name=COMPRESSED_TENSORS,
            forms=(MXFP8, MXFP4, NVFP4),
            parts=compressed_tensors.parts,
            scale_dtype=torch.uint8,
            metadata=lambda _: {"format": "pt"},
            config=compressed_tensors.config_entry,
            read=compressed_tensors.read,
        ),
        FileLayout(
            name=TORCHAO,
            forms=(MXFP8, MXFP8_E5M2, MXFP4),
            of_modules=True,
            parts=torchao.parts,
            scale_dtype=torch.float8_e8m0fnu,
            metadata=torchao.metadata_of,
            mark=torchao.MARK,
            read=torchao.read,
        ),
    )
}
"""The layouts by name; the one without a mark first."""
