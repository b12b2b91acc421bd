"""How MXFP8 and MXFP4 weights lie in a checkpoint, in the layouts of others: one module for each.

All hold whole blocks of 32 along their last dimension alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxcompile.checkpoint import compressed_tensors, gpt_oss, torchao
from mxcompile.checkpoint.files import Checkpoint
from mxcompile.checkpoint.weight_entries import E2M1, E4M3, FP8, Kind, Named
from mxcompile.errors import CheckpointError, not_allowed
from mxcompile.formats import BLOCK, stored_elem
from mxcompile.storage import MXTensor

COMPRESSED_TENSORS, TORCHAO, GPT_OSS = "compressed-tensors", "torchao", "gpt-oss"
NO_LAYOUT = "none"
"""The layout of a checkpoint without a stored weight."""

Parts = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileLayout:
    """How files hold stored weights.

    elems: element types that they can have. of_modules: whether a weight has to belong to a module. parts:
    from the name of a weight and its element type to the names of its elements and scales. scale_dtype: a
    dtype of one byte. metadata: of a file, from the kinds of its tensors. config: the quantization_config of
    a config.json, from the modules that are left as they are and the element types of the others; None
    without one. mark: the key of a file's metadata that tells the layout; "" for that of files without a
    mark. read: the weights of such a checkpoint, checked.
    """

    name: str
    elems: tuple[torch.dtype, ...] = (*FP8, E2M1)
    of_modules: bool = False
    parts: Callable[[str, torch.dtype], tuple[str, str]]
    scale_dtype: torch.dtype
    metadata: Callable[[Mapping[str, Kind]], dict[str, str]]
    config: Callable[[Iterable[str], Mapping[str, torch.dtype]], dict[str, Any]] | None = None
    mark: str = ""
    read: Callable[[Checkpoint], Iterator[Named]]

    def obstacle(self, name: str, shape: tuple[int, ...], block_dim: int, elem: torch.dtype) -> str:
        """Why the layout cannot hold a weight stored so, "" if it can."""
        if block_dim not in (-1, len(shape) - 1):
            return f"{self.name} has blocks along the last dimension only"
        if shape[-1] % BLOCK:
            return f"{self.name} has whole blocks of {BLOCK} only (k={shape[-1]})"
        if elem not in self.elems:
            names = " and ".join(stored_elem(each).name for each in self.elems)
            return f"{self.name} has {names} only"
        if self.of_modules and "." not in name:
            return f"{self.name} names weights of modules only"
        return ""

    def pack(self, name: str, x: MXTensor) -> Parts:
        """The tensors of a file for the weight `x`. Raises `CheckpointError` if the layout cannot hold it."""
        reason = self.obstacle(name, tuple(x.shape), x.block_dim, x.elem_dtype)
        if reason:
            raise CheckpointError(
                f"{name}: {reason}; quantize_weights_ can leave it as it is by a policy rule"
            )
        elements, scales = self.parts(name, x.elem_dtype)
        return {elements: x.qdata.contiguous(), scales: x.scale.view(self.scale_dtype).contiguous()}


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
    return {weight.name: _reader(checkpoint, weight, dtype) for weight in named(checkpoint)[1]}


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
        scales = checkpoint.read(weight.scales).view(torch.float8_e8m0fnu)
        value = MXTensor(elements.view(weight.elem), scales, weight.block_dim, weight.dtype or dtype)
        return value.transpose(-1, -2) if weight.turned else value

    return read


LAYOUTS = {
    layout.name: layout
    for layout in (
        FileLayout(
            name=COMPRESSED_TENSORS,
            elems=(E4M3, E2M1),
            parts=compressed_tensors.parts,
            scale_dtype=torch.uint8,
            metadata=lambda _: {"format": "pt"},
            config=compressed_tensors.config_entry,
            read=compressed_tensors.read,
        ),
        FileLayout(
            name=TORCHAO,
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
