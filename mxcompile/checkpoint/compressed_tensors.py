"""The layout of compressed-tensors.

    mxfp8-quantized        x (E4M3), x_scale (E8M0 bytes, uint8, [N, K/32])
    mxint8-quantized       x (int8), x_scale as above; mxcompile's own, which compressed-tensors does not have
    mxfp4-pack-quantized   x_packed (bytes of two E2M1), x_scale as above
    nvfp4-pack-quantized   x_packed, x_scale (E4M3, [N, K/16]), x_global_scale (FP32 [1], a divisor)

The config.json has a quantization_config with the format of each module. Formats of activations are neither
written nor read, because the policy decides how activations are cast.

Source: compressed_tensors.compressors.mxfp8, .mxfp4 and .nvfp4 (0.20).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from mxcompile.checkpoint.files import Checkpoint, Entry, read_json
from mxcompile.checkpoint.weight_entries import (
    FP8,
    MXFP4,
    MXFP8,
    MXINT8,
    NVFP4,
    SUFFIX,
    plain_weight,
    stored_weight,
)
from mxcompile.errors import CheckpointError, not_allowed
from mxcompile.formats import Format, stored_form
from mxcompile.storage.weights import StoredWeight

_PACKED, _GLOBAL, _ZERO_POINT = "_packed", "_global_scale", "_zero_point"

_FORMATS = {
    MXFP8: "mxfp8-quantized",
    MXINT8: "mxint8-quantized",
    MXFP4: "mxfp4-pack-quantized",
    NVFP4: "nvfp4-pack-quantized",
}
"""Names of formats in a config.json."""

_MIXED, _DENSE = "mixed-precision", "dense"
_METHOD = "compressed-tensors"


def config_entry(ignored: Iterable[str], stored_modules: Mapping[str, Format]) -> dict[str, Any]:
    """Returns the quantization_config of a compressed-tensors checkpoint.

    Args:
        ignored: Modules whose weights are not stored quantized.
        stored_modules: Format of the weights of each other module.
    """
    forms = [form for form in _FORMATS if form in stored_modules.values()] or [MXFP8]
    groups: dict[str, Any] = {}
    for number, form in enumerate(forms):
        of_form = sorted(name for name, each in stored_modules.items() if each == form)
        scale_dtype = str(form.scale.dtype)
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(forms) == 1 else of_form,
            "weights": {
                "num_bits": form.elem.bits, "type": "int" if form.elem.is_integer else "float",
                "strategy": "tensor_group" if form.two_level else "group", "group_size": form.tile.along,
                "symmetric": True, "dynamic": False, "scale_dtype": scale_dtype, "zp_dtype": scale_dtype,
            },
            "input_activations": None, "output_activations": None, "format": _FORMATS[form],
        }  # fmt: skip
    return {
        "quant_method": _METHOD,
        "format": _FORMATS[forms[0]] if len(forms) == 1 else _MIXED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(set(ignored)),
    }


def parts(name: str, form: Format) -> tuple[str, ...]:
    """Returns the tensor names of a weight: elements, scales, and global scale if the format has one."""
    whole = (name + _GLOBAL,) if form.two_level else ()
    return (name + (_PACKED if form.elem.packed else ""), name + SUFFIX, *whole)


def read(checkpoint: Checkpoint) -> Iterator[StoredWeight]:
    """Yields the weights of `checkpoint`. Raises `CheckpointError`."""
    _check_config(checkpoint)
    entries = checkpoint.entries
    for name, entry in entries.items():
        if _belongs_to(entries, name):
            continue
        if _is_plain(entries, name):
            yield stored_weight(name, entry, entries.get(name + SUFFIX), stored_form(entry.dtype))
        elif name.endswith(_PACKED) and entry.dtype is torch.uint8:
            yield _packed(entries, name.removesuffix(_PACKED), entry)
        else:
            module, _, attribute = name.rpartition(".")
            of_inputs = attribute == f"input{_GLOBAL}" and f"{module}.weight{_PACKED}" in entries
            yield plain_weight(entry, is_read=not of_inputs)


def _packed(entries: Mapping[str, Entry], name: str, entry: Entry) -> StoredWeight:
    """Returns the weight `name`, whose packed elements are `entry`."""
    if name + _ZERO_POINT in entries:
        raise CheckpointError(f"{entry.file}: {entry.name!r} has zero points, which are not read")
    scale, whole = entries.get(name + SUFFIX), entries.get(name + _GLOBAL)
    two_level = whole is not None or (scale is not None and scale.dtype is NVFP4.scale.dtype)
    return stored_weight(name, entry, scale, NVFP4 if two_level else MXFP4, global_scale=whole)


def _belongs_to(entries: Mapping[str, Entry], name: str) -> bool:
    """Whether `name` is a scale of another tensor."""
    for suffix in (_GLOBAL, SUFFIX):
        base = name.removesuffix(suffix)
        packed, plain = entries.get(base + _PACKED), entries.get(base)
        if base != name and packed is not None and packed.dtype is torch.uint8:
            return True
        if base != name and suffix == SUFFIX and plain is not None and _is_plain(entries, base):
            return True
    return False


def _is_plain(entries: Mapping[str, Entry], name: str) -> bool:
    """Whether `name` has the elements of a stored weight, one a byte: FP8, or integers under E8M0 scales."""
    dtype, scale = entries[name].dtype, entries.get(name + SUFFIX)
    has_bytes = scale is not None and scale.dtype is MXINT8.scale.dtype
    return dtype in FP8 or (dtype is MXINT8.stored_dtype and has_bytes)


def _check_config(checkpoint: Checkpoint) -> None:
    """Raises `CheckpointError` if config.json has a weight format that cannot be read."""
    file = checkpoint.path / "config.json"
    about = read_json(file).get("quantization_config") if file.is_file() else None
    if not isinstance(about, dict) or about.get("quant_method") != _METHOD:
        return
    groups = about.get("config_groups")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if weights is None:
            continue
        word = group.get("format") or about.get("format")
        if word not in {None, _MIXED, _DENSE, *_FORMATS.values()}:
            raise CheckpointError(f"{file}: {name}: {not_allowed('format', word, _FORMATS.values())}")
