"""How MXFP8 weights lie in a checkpoint, in the layouts of others.

    compressed-tensors  x (E4M3), x_scale (E8M0 bytes, uint8, [N, K/32]); quantization_config in config.json
    torchao             m._weight_qdata and m._weight_scale (E8M0), and JSON in the file's metadata

Both hold whole blocks of 32 along the last dimension alone. Source: compressed_tensors.compressors.mxfp8
(0.20), torchao.prototype.safetensors (0.18).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxcompile.checkpoint.files import Checkpoint, Entry
from mxcompile.errors import CheckpointError, not_allowed
from mxcompile.formats import BLOCK, num_blocks
from mxcompile.storage import MXTensor

COMPRESSED_TENSORS, TORCHAO = "compressed-tensors", "torchao"
NO_LAYOUT = "none"
"""The layout of a checkpoint without a weight in MXFP8."""

_E4M3 = torch.float8_e4m3fn
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

Parts = dict[str, Tensor]
Kind = tuple[torch.dtype, torch.dtype] | None
"""Element and value dtype of a weight in MXFP8, None for other tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """One weight of a checkpoint.

    name: in the model. elements, scales: names of its tensors in the files; scales is "" for a tensor that is
    not MXFP8. block_dim: negative, of MXFP8. dtype: of the values, where the checkpoint says.
    """

    name: str
    elements: str
    scales: str = ""
    block_dim: int = -1
    dtype: torch.dtype | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FileLayout:
    """How files hold weights in MXFP8.

    elems: element types that they can have. of_modules: whether a weight has to belong to a module. parts:
    from the name of a weight to the names of its elements and scales. scale_dtype: a dtype of one byte.
    metadata: of a file, from the kinds of its tensors. config: the quantization_config of a config.json, from
    the modules that are left as they are; None without one. mark: the key of a file's metadata that tells the
    layout; "" for that of files without a mark. read: the weights of such a checkpoint, checked.
    """

    name: str
    elems: tuple[torch.dtype, ...] = _FP8
    of_modules: bool = False
    parts: Callable[[str], tuple[str, str]]
    scale_dtype: torch.dtype
    metadata: Callable[[Mapping[str, Kind]], dict[str, str]]
    config: Callable[[Iterable[str]], dict[str, Any]] | None = None
    mark: str = ""
    read: Callable[[Checkpoint], Iterator[Named]]

    def obstacle(self, name: str, shape: tuple[int, ...], block_dim: int, elem: torch.dtype) -> str:
        """Why the layout cannot hold a weight in MXFP8, "" if it can."""
        if block_dim not in (-1, len(shape) - 1):
            return f"{self.name} has blocks along the last dimension only"
        if shape[-1] % BLOCK:
            return f"{self.name} has whole blocks of {BLOCK} only (k={shape[-1]})"
        if elem not in self.elems:
            return f"{self.name} has e4m3 only"
        if self.of_modules and "." not in name:
            return f"{self.name} names weights of modules only"
        return ""

    def pack(self, name: str, x: MXTensor) -> Parts:
        """The tensors of a file for the weight `x`. Raises `CheckpointError` if the layout cannot hold it."""
        reason = self.obstacle(name, tuple(x.shape), x.block_dim, x.qdata.dtype)
        if reason:
            raise CheckpointError(
                f"{name}: {reason}; quantize_weights_ can leave it as it is by a policy rule"
            )
        elements, scales = self.parts(name)
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
    """The layout of the MXFP8 weights of `checkpoint`, "none" if it has none; all its weights, checked."""
    marks = {key for metadata in checkpoint.metadata for key in metadata} | {""}
    layout = next(layout for layout in reversed(LAYOUTS.values()) if layout.mark in marks)
    weights = [*layout.read(checkpoint)]
    return layout.name if any(weight.scales for weight in weights) else NO_LAYOUT, weights


def _reader(checkpoint: Checkpoint, weight: Named, dtype: torch.dtype) -> Callable[[], Tensor]:
    def read() -> Tensor:
        elements = checkpoint.read(weight.elements)
        if not weight.scales:
            return elements
        scales = checkpoint.read(weight.scales).view(torch.float8_e8m0fnu)
        return MXTensor(elements, scales, weight.block_dim, weight.dtype or dtype)

    return read


def _block_dim(entry: Entry, scale: Entry | None) -> int:
    """The dimension that blocks run along, from the shapes. Raises `CheckpointError`."""
    what = f"{entry.file}: {entry.name!r}"
    if scale is None:
        raise CheckpointError(f"{what} is FP8 but {entry.name + _SUFFIX!r} is missing: not an MXFP8 weight")
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise CheckpointError(f"{what} has scales of {scale.dtype}, not E8M0 bytes: not an MXFP8 weight")
    for dim in range(-1, -len(entry.shape) - 1, -1):
        blocks = list(entry.shape)
        blocks[dim] = num_blocks(blocks[dim])
        if tuple(blocks) == scale.shape:
            return dim
    raise CheckpointError(f"{what} has shape {entry.shape}, which scales of {scale.shape} do not fit")


_SUFFIX = "_scale"
_NAMES = "tensor_names"


def config_entry(ignored: Iterable[str]) -> dict[str, Any]:
    """The quantization_config of a compressed-tensors checkpoint. ignored: modules left as they are."""
    weights = {
        "num_bits": 8, "type": "float", "strategy": "group", "group_size": BLOCK, "symmetric": True,
        "dynamic": False, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8",
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None,
                        "output_activations": None, "format": "mxfp8-quantized"}
        },
        "ignore": sorted(set(ignored)),
    }  # fmt: skip


def _compressed(checkpoint: Checkpoint) -> Iterator[Named]:
    entries = checkpoint.entries
    for name, entry in entries.items():
        elements = entries.get(name.removesuffix(_SUFFIX)) if name.endswith(_SUFFIX) else None
        if elements is not None and elements.dtype in _FP8:
            continue
        if entry.dtype in _FP8:
            dim = _block_dim(entry, entries.get(name + _SUFFIX))
            yield Named(name=name, elements=name, scales=name + _SUFFIX, block_dim=dim)
        else:
            yield Named(name=name, elements=name)


def _torchao_parts(name: str) -> tuple[str, str]:
    module, _, attribute = name.rpartition(".")
    return f"{module}._{attribute}_qdata", f"{module}._{attribute}_scale"


def _torchao_metadata(tensors: Mapping[str, Kind]) -> dict[str, str]:
    entries = {name: json.dumps(_torchao_entry(kind)) for name, kind in tensors.items()}
    return {"format": "pt", **entries, _NAMES: json.dumps([*tensors])}


def _torchao_entry(kind: Kind) -> dict[str, Any]:
    if kind is None:
        return {"_type": "Tensor"}
    elem, dtype = ({"_type": "torch.dtype", "_data": str(each).removeprefix("torch.")} for each in kind)
    data = {
        "elem_dtype": elem,
        "block_size": BLOCK,
        "orig_dtype": dtype,
        "kernel_preference": {"_type": "KernelPreference", "_data": "AUTO"},
        "act_quant_kwargs": None,
        "is_swizzled_scales": False,
    }
    return {"_type": "MXTensor", "_data": data, "_tensor_data_names": ["qdata", "scale"]}


def _torchao(checkpoint: Checkpoint) -> Iterator[Named]:
    for metadata in checkpoint.metadata:
        yield from _torchao_file(checkpoint, metadata)


def _torchao_file(checkpoint: Checkpoint, metadata: Mapping[str, str]) -> Iterator[Named]:
    """The weights of one file."""
    for name in _parsed(checkpoint, metadata, _NAMES, list):
        about = _parsed(checkpoint, metadata, name, dict)
        if about.get("_type") != "Tensor":
            yield _torchao_weight(checkpoint, name, about)
        elif name not in checkpoint.entries:
            raise CheckpointError(f"{checkpoint.path}: {name!r} is missing")
        else:
            yield Named(name=name, elements=name)


def _torchao_weight(checkpoint: Checkpoint, name: str, about: Mapping[str, Any]) -> Named:
    data = about.get("_data") or {}
    what = f"{checkpoint.path}: {name!r}"
    if about.get("_type") != "MXTensor" or data.get("block_size") != BLOCK:
        raise CheckpointError(f"{what} is a torchao {about.get('_type')}, not MXFP8")
    if data.get("is_swizzled_scales"):
        raise CheckpointError(f"{what} has swizzled scales, which are not read")
    elements, scales = map(checkpoint.entries.get, _torchao_parts(name))
    if elements is None or scales is None or elements.dtype not in _FP8:
        raise CheckpointError(f"{what} has no FP8 elements with scales")
    dtype = getattr(torch, str((data.get("orig_dtype") or {}).get("_data")), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CheckpointError(f"{what} has no floating-point dtype")
    dim = _block_dim(elements, scales)
    return Named(name=name, elements=elements.name, scales=scales.name, block_dim=dim, dtype=dtype)


def _parsed(checkpoint: Checkpoint, metadata: Mapping[str, str], key: str, kind: type) -> Any:
    try:
        value = json.loads(metadata[str(key)])
    except (KeyError, ValueError):
        value = None
    if not isinstance(value, kind):
        raise CheckpointError(f"{checkpoint.path}: its metadata says nothing of {key!r}")
    return value


LAYOUTS = {
    layout.name: layout
    for layout in (
        FileLayout(
            name=COMPRESSED_TENSORS,
            elems=(_E4M3,),
            parts=lambda name: (name, name + _SUFFIX),
            scale_dtype=torch.uint8,
            metadata=lambda _: {"format": "pt"},
            config=config_entry,
            read=_compressed,
        ),
        FileLayout(
            name=TORCHAO,
            of_modules=True,
            parts=_torchao_parts,
            scale_dtype=torch.float8_e8m0fnu,
            metadata=_torchao_metadata,
            mark=_NAMES,
            read=_torchao,
        ),
    )
}
"""The layouts by name; the one without a mark first."""
