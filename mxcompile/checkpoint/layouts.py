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
LAYOUTS = (COMPRESSED_TENSORS, TORCHAO)
NO_LAYOUT = "none"
"""That of a checkpoint without a weight in MXFP8."""
SUFFIX = "_scale"

_E4M3 = torch.float8_e4m3fn
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

Parts = dict[str, Tensor]


def check_layout(layout: str) -> str:
    """`layout`, or a `CheckpointError` that lists those there are."""
    if layout not in LAYOUTS:
        raise CheckpointError(not_allowed("layout", layout, LAYOUTS))
    return layout


def obstacle(name: str, shape: tuple[int, ...], block_dim: int, elem: torch.dtype, layout: str) -> str:
    """Why `layout` cannot hold a weight in MXFP8, "" if it can."""
    if block_dim not in (-1, len(shape) - 1):
        return f"{layout} has blocks along the last dimension only"
    if shape[-1] % BLOCK:
        return f"{layout} has whole blocks of {BLOCK} only (k={shape[-1]})"
    if layout == COMPRESSED_TENSORS and elem is not _E4M3:
        return f"{layout} has e4m3 only"
    if layout == TORCHAO and "." not in name:
        return f"{layout} names weights of modules only"
    return ""


def pack(name: str, x: MXTensor, layout: str) -> Parts:
    """What a file of `layout` holds for the weight `x`. Raises `CheckpointError` if it cannot."""
    reason = obstacle(name, tuple(x.shape), x.block_dim, x.qdata.dtype, layout)
    if reason:
        raise CheckpointError(f"{name}: {reason}; quantize_weights_ can leave it as it is by a policy rule")
    if layout == COMPRESSED_TENSORS:
        return {name: x.qdata.contiguous(), name + SUFFIX: x.scale_bytes.contiguous()}
    prefix = _torchao_prefix(name)
    return {f"{prefix}qdata": x.qdata.contiguous(), f"{prefix}scale": x.scale.contiguous()}


def _torchao_prefix(name: str) -> str:
    module, _, attribute = name.rpartition(".")
    return f"{module}._{attribute}_"


def metadata(tensors: Mapping[str, tuple[torch.dtype, torch.dtype] | None], layout: str) -> dict[str, str]:
    """The metadata of a file. tensors: element and value dtype of those in MXFP8, None for others."""
    if layout != TORCHAO:
        return {"format": "pt"}
    found = {name: json.dumps(_torchao_entry(kind)) for name, kind in tensors.items()}
    return {"format": "pt", **found, "tensor_names": json.dumps([*tensors])}


def _torchao_entry(kind: tuple[torch.dtype, torch.dtype] | None) -> dict[str, Any]:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """One weight of a checkpoint.

    name: in the model. elements, scales: names of its tensors in the files; scales is "" for what is no
    MXFP8.
    block_dim: negative, of MXFP8. dtype: of the values, where the checkpoint says.
    """

    name: str
    elements: str
    scales: str = ""
    block_dim: int = -1
    dtype: torch.dtype | None = None


def stored(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """The weights of `checkpoint` by name, each as a function that reads it: an `MXTensor` or as it is.

    dtype: of the values, where the checkpoint does not say. Every pair of elements and scales is checked
    before anything is read. Raises `CheckpointError`.
    """
    return {weight.name: _reader(checkpoint, weight, dtype) for weight in named(checkpoint)[1]}


def named(checkpoint: Checkpoint) -> tuple[str, list[Named]]:
    """The layout of the MXFP8 weights of `checkpoint`, "none" if it has none; all its weights, checked."""
    if any("tensor_names" in each for each in checkpoint.metadata):
        parts = (_torchao(checkpoint, each) for each in checkpoint.metadata)
        weights = [weight for part in parts for weight in part]
        return TORCHAO if any(each.scales for each in weights) else NO_LAYOUT, weights
    entries, found = checkpoint.entries, []
    for name, entry in entries.items():
        if name.endswith(SUFFIX) and _is_fp8(entries.get(name.removesuffix(SUFFIX))):
            continue
        if entry.dtype in _FP8:
            dim = _block_dim(entry, entries.get(name + SUFFIX))
            found.append(Named(name=name, elements=name, scales=name + SUFFIX, block_dim=dim))
        else:
            found.append(Named(name=name, elements=name))
    return COMPRESSED_TENSORS if any(each.scales for each in found) else NO_LAYOUT, found


def _is_fp8(entry: Entry | None) -> bool:
    return entry is not None and entry.dtype in _FP8


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
        raise CheckpointError(f"{what} is FP8 without {entry.name + SUFFIX!r}: no MXFP8 weight")
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise CheckpointError(f"{what} has scales of {scale.dtype}, not E8M0 bytes: no MXFP8 weight")
    for dim in range(-1, -len(entry.shape) - 1, -1):
        blocks = list(entry.shape)
        blocks[dim] = num_blocks(blocks[dim])
        if tuple(blocks) == scale.shape:
            return dim
    raise CheckpointError(f"{what} has shape {entry.shape}, which scales of {scale.shape} do not fit")


def _torchao(checkpoint: Checkpoint, metadata: Mapping[str, str]) -> Iterator[Named]:
    """The weights of one file."""
    for name in _parsed(checkpoint, metadata, "tensor_names", list):
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
    prefix = _torchao_prefix(name)
    elements, scales = (checkpoint.entries.get(f"{prefix}{part}") for part in ("qdata", "scale"))
    if elements is None or scales is None or elements.dtype not in _FP8:
        raise CheckpointError(f"{what} has no FP8 elements with scales")
    dtype = getattr(torch, str((data.get("orig_dtype") or {}).get("_data")), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CheckpointError(f"{what} has no floating-point dtype")
    dim = _block_dim(elements, scales)
    return Named(name=name, elements=elements.name, scales=scales.name, block_dim=dim, dtype=dtype)


def _parsed(checkpoint: Checkpoint, metadata: Mapping[str, str], key: str, kind: type) -> Any:
    try:
        found = json.loads(metadata[str(key)])
    except (KeyError, ValueError):
        found = None
    if not isinstance(found, kind):
        raise CheckpointError(f"{checkpoint.path}: its metadata says nothing of {key!r}")
    return found
