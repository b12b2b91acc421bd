"""torchao's layout: m._weight_qdata and m._weight_scale (E8M0), and JSON in the file's metadata.

Source: torchao.prototype.safetensors (0.18).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mxcompile.checkpoint.files import Checkpoint
from mxcompile.checkpoint.weight_entries import E2M1, FP8, MXFP8, plain_weight, stored_weight
from mxcompile.errors import CheckpointError
from mxcompile.formats import BLOCK, Format, ScaleType
from mxcompile.storage import MXTensor
from mxcompile.storage.weights import StoredWeight

MARK = "tensor_names"
"""Metadata key that identifies the layout."""

_E2M1_WORD = str(E2M1).removeprefix("torch.")


def parts(name: str, form: Format) -> tuple[str, str]:
    """Returns the names of the elements and scales of the weight `name`."""
    module, _, attribute = name.rpartition(".")
    return f"{module}._{attribute}_qdata", f"{module}._{attribute}_scale"


def metadata_of(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns the metadata of a file with `weights`."""
    entries = {name: json.dumps(_entry(weight)) for name, weight in weights.items()}
    return {"format": "pt", **entries, MARK: json.dumps([*weights])}


def _entry(weight: Tensor) -> dict[str, Any]:
    if not isinstance(weight, MXTensor):
        return {"_type": "Tensor"}
    dtypes = weight.form.elem.stored_dtype, weight.dtype
    elem, dtype = ({"_type": "torch.dtype", "_data": str(kind).removeprefix("torch.")} for kind in dtypes)
    data = {
        "elem_dtype": elem,
        "block_size": BLOCK,
        "orig_dtype": dtype,
        "kernel_preference": {"_type": "KernelPreference", "_data": "AUTO"},
        "act_quant_kwargs": None,
        "is_swizzled_scales": False,
    }
    return {"_type": "MXTensor", "_data": data, "_tensor_data_names": ["qdata", "scale"]}


def read(checkpoint: Checkpoint) -> Iterator[StoredWeight]:
    """Yields the weights of `checkpoint`. Raises `CheckpointError`."""
    for metadata in checkpoint.metadata:
        for name in _parsed(checkpoint, metadata, MARK, list):
            about = _parsed(checkpoint, metadata, name, dict)
            if about.get("_type") != "Tensor":
                yield _weight(checkpoint, name, about)
            elif name not in checkpoint.entries:
                raise CheckpointError(f"{checkpoint.path}: {name!r} is missing")
            else:
                yield plain_weight(checkpoint.entries[name])


def _weight(checkpoint: Checkpoint, name: str, about: Mapping[str, Any]) -> StoredWeight:
    data = about.get("_data") or {}
    source = f"{checkpoint.path}: {name!r}"
    if about.get("_type") != "MXTensor" or data.get("block_size") != BLOCK:
        raise CheckpointError(f"{source} is a torchao {about.get('_type')}, not MXFP8 or MXFP4")
    if data.get("is_swizzled_scales"):
        raise CheckpointError(f"{source} has swizzled scales: save it with row-major scales")
    elements, scales = map(checkpoint.entries.get, parts(name, MXFP8))
    word = (data.get("elem_dtype") or {}).get("_data")
    is_packed = elements is not None and elements.dtype is torch.uint8 and word == _E2M1_WORD
    if elements is None or scales is None or not (elements.dtype in FP8 or is_packed):
        raise CheckpointError(f"{source} has no FP8 or packed FP4 elements with scales")
    dtype = getattr(torch, str((data.get("orig_dtype") or {}).get("_data")), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CheckpointError(f"{source} has no floating-point dtype")
    weight = stored_weight(name, elements, scales, dtype)
    if weight.form is None or weight.form.scale is not ScaleType.E8M0:
        raise CheckpointError(f"{source} has scales of {scales.dtype}, not E8M0 bytes")
    return weight


def _parsed(checkpoint: Checkpoint, metadata: Mapping[str, str], key: str, kind: type) -> Any:
    try:
        value = json.loads(metadata[str(key)])
    except (KeyError, ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise CheckpointError(f"{checkpoint.path}: its metadata lacks {key!r}")
    return value
