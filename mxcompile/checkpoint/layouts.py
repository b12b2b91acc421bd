"""How MXFP8 weights lie in a checkpoint, in the layouts of others.

    compressed-tensors  x (E4M3), x_scale (E8M0 bytes, uint8, [N, K/32]); quantization_config in config.json
    torchao             m._weight_qdata and m._weight_scale (E8M0), and JSON in the file's metadata

Both hold whole blocks of 32 along the last dimension alone. Source: compressed_tensors.compressors.mxfp8
(0.20), torchao.prototype.safetensors (0.18).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mxcompile.checkpoint.files import Checkpoint, Entry
from mxcompile.errors import CheckpointError, not_allowed
from mxcompile.formats import BLOCK, num_blocks
from mxcompile.storage import MXTensor

COMPRESSED_TENSORS, TORCHAO = "compressed-tensors", "torchao"
LAYOUTS = (COMPRESSED_TENSORS, TORCHAO)
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
        "ignore": sorted(ignored),
    }  # fmt: skip


def stored(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """The weights of `checkpoint` by name, each as a function that reads it: an `MXTensor` or as it is.

    dtype: of the values, where the checkpoint does not say. Every pair of elements and scales is checked
    before anything is read. Raises `CheckpointError`.
    """
    if any("tensor_names" in each for each in checkpoint.metadata):
        named = (_torchao(checkpoint, each) for each in checkpoint.metadata)
        return {name: read for part in named for name, read in part.items()}
    found: dict[str, Callable[[], Tensor]] = {}
    for name, entry in checkpoint.entries.items():
        if name.endswith(SUFFIX) and _is_fp8(checkpoint.entries.get(name.removesuffix(SUFFIX))):
            continue
        if entry.dtype in _FP8:
            scale = checkpoint.entries.get(name + SUFFIX)
            dim = _block_dim(entry, scale)
            found[name] = _reader(checkpoint, name, name + SUFFIX, dim, dtype)
        else:
            found[name] = _plain(checkpoint, name)
    return found


def _is_fp8(entry: Entry | None) -> bool:
    return entry is not None and entry.dtype in _FP8


def _plain(checkpoint: Checkpoint, name: str) -> Callable[[], Tensor]:
    return lambda: checkpoint.read(name)


def _reader(
    checkpoint: Checkpoint, name: str, scale: str, dim: int, dtype: torch.dtype
) -> Callable[[], Tensor]:
    def read() -> Tensor:
        scales = checkpoint.read(scale).view(torch.uint8).view(torch.float8_e8m0fnu)
        return MXTensor(checkpoint.read(name), scales, dim, dtype)

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


def _torchao(checkpoint: Checkpoint, metadata: Mapping[str, str]) -> dict[str, Callable[[], Tensor]]:
    found: dict[str, Callable[[], Tensor]] = {}
    for name in _parsed(checkpoint, metadata, "tensor_names", list):
        about = _parsed(checkpoint, metadata, name, dict)
        if about.get("_type") == "Tensor":
            if name not in checkpoint.entries:
                raise CheckpointError(f"{checkpoint.path}: {name!r} is missing")
            found[name] = _plain(checkpoint, name)
            continue
        data = about.get("_data") or {}
        if about.get("_type") != "MXTensor" or data.get("block_size") != BLOCK:
            raise CheckpointError(f"{checkpoint.path}: {name!r} is a torchao {about.get('_type')}, not MXFP8")
        if data.get("is_swizzled_scales"):
            raise CheckpointError(f"{checkpoint.path}: {name!r} has swizzled scales, which are not read")
        prefix = _torchao_prefix(name)
        parts = checkpoint.entries.get(f"{prefix}qdata"), checkpoint.entries.get(f"{prefix}scale")
        elements, scales = parts
        if elements is None or scales is None or elements.dtype not in _FP8:
            raise CheckpointError(f"{checkpoint.path}: {name!r} has no FP8 elements with scales")
        dtype = getattr(torch, str((data.get("orig_dtype") or {}).get("_data")), None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise CheckpointError(f"{checkpoint.path}: {name!r} has no floating-point dtype")
        dim = _block_dim(elements, scales)
        found[name] = _reader(checkpoint, elements.name, scales.name, dim, dtype)
    return found


def _parsed(checkpoint: Checkpoint, metadata: Mapping[str, str], key: str, kind: type) -> Any:
    try:
        found = json.loads(metadata[str(key)])
    except (KeyError, ValueError):
        found = None
    if not isinstance(found, kind):
        raise CheckpointError(f"{checkpoint.path}: its metadata says nothing of {key!r}")
    return found
