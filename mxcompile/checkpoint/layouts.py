"""The layouts of stored weights in checkpoints.

A weight can be written in a layout only if its blocks run along the last dimension and are whole.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxcompile.checkpoint import separate, torchao
from mxcompile.checkpoint.declared import compressed_tensors_config, quantization_config
from mxcompile.checkpoint.files import Checkpoint
from mxcompile.checkpoint.weight_entries import (
    MXFP4,
    MXFP8,
    MXFP8_E5M2,
    MXINT8,
    NVFP4,
    SUFFIX,
    divisor,
    row_scales,
)
from mxcompile.errors import CheckpointError, check_word, not_allowed
from mxcompile.formats import Format, stored_precision
from mxcompile.storage import MXTensor
from mxcompile.storage.weights import StoredWeight

log = logging.getLogger(__name__)

COMPRESSED_TENSORS, TORCHAO, GPT_OSS = "compressed-tensors", "torchao", "gpt-oss"
NO_LAYOUT = "none"
"""Layout of a checkpoint without stored weights."""


Config = Callable[[Iterable[str], Mapping[str, Format]], dict[str, Any]]
"""Takes the modules without stored weights, and the formats by module. Returns a quantization_config."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileLayout:
    """The layout of stored weights in files.

    forms: formats of the weights that are written; empty for a layout that is only read. of_modules: whether
    a weight must belong to a module. parts: takes a weight's name and format; returns the names of its
    elements and scales, and of its global scale if the format has one. scale_dtype: dtype of E8M0 scales in
    files. metadata: takes the weights of a file; returns its metadata. config: returns the
    quantization_config of a config.json; None if the layout has none. mark: key in the metadata of the
    layout's files, "" if config.json has its name as quant_method. read: yields the weights of a checkpoint,
    checked.
    """

    name: str
    forms: tuple[Format, ...] = ()
    of_modules: bool = False
    parts: Callable[[str, Format], tuple[str, ...]] = separate.parts
    scale_dtype: torch.dtype = torch.uint8
    metadata: Callable[[Mapping[str, Tensor]], dict[str, str]] = lambda _: {"format": "pt"}
    config: Config | None = None
    mark: str = ""
    read: Callable[[Checkpoint], Iterator[StoredWeight]] = separate.read

    def obstacle(self, weight: StoredWeight) -> str:
        """Returns why the layout does not support a weight that is stored quantized, "" if it does."""
        assert weight.form is not None
        if weight.block_dim not in (-1, len(weight.shape) - 1):
            return f"{self.name} has blocks along the last dimension only"
        if weight.form.stored not in self.forms:
            *names, last = (f"{stored_precision(form).label} {form.elem}" for form in self.forms)
            supported = f"{', '.join(names)} and {last}" if names else last
            return f"{self.name} has {supported} only"
        if weight.shape[-1] % weight.form.tile.along:
            return f"{self.name} has whole blocks of {weight.form.tile.along} only (k={weight.shape[-1]})"
        if self.of_modules and "." not in weight.name:
            return f"{self.name} names weights of modules only"
        return ""

    def pack(self, name: str, value: Tensor) -> dict[str, Tensor]:
        """Returns the tensors of a file for a tensor. Raises `CheckpointError` for an unsupported format."""
        if not isinstance(value, MXTensor):
            return {name: value.contiguous()}
        weight = StoredWeight(name=name, shape=tuple(value.shape), form=value.form, block_dim=value.block_dim)
        if reason := self.obstacle(weight):
            raise CheckpointError(
                f"{name}: {reason}; add a policy rule, so that quantize_weights_ leaves it as it is"
            )
        scale = value.scale if value.form.two_level else value.scale.view(self.scale_dtype)
        tensors = [value.qdata.contiguous(), scale.contiguous()]
        if value.global_scale is not None:
            numbers = value.global_scale.reshape(-1)
            if not numbers.is_meta and not torch.equal(numbers, numbers[:1].expand_as(numbers)):
                count = len(numbers.unique())
                raise CheckpointError(
                    f"{name}: its rows have {count} global scales, and a file stores a single one"
                )
            tensors.append(numbers[:1].contiguous())
        return dict(zip(self.parts(name, value.form), tensors, strict=True))


def layout_of(name: str) -> FileLayout:
    """Returns the layout called `name`, to write it. Raises `CheckpointError` if there is none."""
    written = [layout.name for layout in LAYOUTS.values() if layout.forms]
    check_word("layout", name, written, CheckpointError)
    return LAYOUTS[name]


def readers(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """Returns, for each weight of `checkpoint`, a function that reads it as an `MXTensor` or a plain tensor.

    All pairs of elements and scales are checked before anything is read. dtype: dtype of the values of stored
    weights, if the checkpoint does not contain it. Raises `CheckpointError` if tensors are inconsistent.
    """
    weights = weights_in(checkpoint)[1]
    if unread := sum(not weight.is_read for weight in weights):
        log.warning(
            "%s: %d scales of activations are not read: the policy decides how activations are cast, by their"
            " own largest magnitude",
            checkpoint.path,
            unread,
        )
    return {
        weight.name: functools.partial(_read, checkpoint, weight, dtype)
        for weight in weights
        if weight.is_read
    }


def weights_in(checkpoint: Checkpoint) -> tuple[str, list[StoredWeight]]:
    """Returns the layout of the stored weights of `checkpoint` ("none" without any), and all its weights.

    Raises `CheckpointError` if tensors are inconsistent.
    """
    if any(separate.is_gpt_oss(entry) for entry in checkpoint.entries.values()):
        return GPT_OSS, [*separate.read_gpt_oss(checkpoint)]
    marks = {key for metadata in checkpoint.metadata for key in metadata} - {""}
    layout = next((candidate for candidate in LAYOUTS.values() if candidate.mark in marks), None)
    if layout is None:
        source, about = quantization_config(checkpoint)
        method = about.get("quant_method", COMPRESSED_TENSORS)
        layout = LAYOUTS.get(method)
        if layout is None or layout.mark:
            names = [candidate.name for candidate in LAYOUTS.values() if not candidate.mark]
            raise CheckpointError(f"{source}: {not_allowed('quant_method', str(method), names)}")
    weights = [*layout.read(checkpoint)]
    return layout.name if any(weight.stored for weight in weights) else NO_LAYOUT, weights


def _read(checkpoint: Checkpoint, weight: StoredWeight, dtype: torch.dtype) -> Tensor:
    elements, *parts = (checkpoint.read(name) for name in weight.tensors)
    if weight.form is None:
        return elements
    scales = row_scales(parts[0], weight, f"{checkpoint.path}: {weight.tensors[1]!r}")
    is_swapped = elements.ndim > len(weight.shape)  # GPT-OSS: [E, N, K/32, 16], transposed
    elements = (elements.flatten(-2) if is_swapped else elements).view(weight.form.stored_dtype)
    whole = parts[1] if weight.form.two_level else None
    if whole is not None and not (whole.isfinite() & (whole > 0)).all():  # scales are divided by it
        name = weight.tensors[-1]
        raise CheckpointError(
            f"{checkpoint.entries[name]} is {whole.item()}, not a positive number: not an NVFP4 weight"
        )
    if whole is not None and weight.tensors[-1].endswith(separate.MULTIPLIER):
        whole = divisor(whole.reshape(1), weight.dtype or dtype)
    dim = -1 if is_swapped else weight.block_dim
    value = MXTensor(elements, scales, dim, weight.dtype or dtype, whole)
    return value.transpose(-1, -2) if is_swapped else value


LAYOUTS = {
    layout.name: layout
    for layout in (
        FileLayout(
            name=COMPRESSED_TENSORS, forms=(MXFP8, MXINT8, MXFP4, NVFP4), config=compressed_tensors_config
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
        FileLayout(
            name="mxfp8",
            forms=(MXFP8,),
            parts=lambda name, _: (name, f"{name}{SUFFIX}_inv"),
            config=lambda ignored, _: {
                "quant_method": "mxfp8", "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0",
                "weight_block_size": [1, 32], "ignored_layers": sorted(set(ignored)),
            },
        ),
        FileLayout(
            name="modelopt",
            forms=(MXFP8,),
            config=lambda ignored, _: {
                "quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": sorted(set(ignored)),
            },
        ),
        FileLayout(name="fp8"),
        FileLayout(name="auto-round"),
    )
}  # fmt: skip
"""The layouts by name, which is also the quant_method of config.json. The first is the default."""
