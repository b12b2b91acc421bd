"""The layout of compressed-tensors.

    x (E4M3) or x_packed (bytes of two E2M1), x_scale (E8M0 bytes, uint8, [N, K/32])

The config.json has a quantization_config that says which modules are in which format. Source:
compressed_tensors.compressors.mxfp8 and .mxfp4 (0.20).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from mxcompile.checkpoint.files import Checkpoint, Entry
from mxcompile.checkpoint.weight_entries import E2M1, E4M3, FP8, SUFFIX, Named, as_it_is, stored_weight
from mxcompile.formats import BLOCK, stored_elem

_PACKED = "_packed"

_FORMATS = {E4M3: ("mxfp8-quantized", 8), E2M1: ("mxfp4-pack-quantized", 4)}
"""What compressed-tensors calls a format, and its bits, by element type."""

_MIXED = "mixed-precision"


def config_entry(ignored: Iterable[str], stored_modules: Mapping[str, torch.dtype]) -> dict[str, Any]:
    """The quantization_config of a compressed-tensors checkpoint.

    ignored: modules left as they are. stored_modules: element types of the others, by module.
    """
    elems = [elem for elem in _FORMATS if elem in stored_modules.values()] or [E4M3]
    groups: dict[str, Any] = {}
    for number, elem in enumerate(elems):
        word, bits = _FORMATS[elem]
        of_elem = sorted(name for name, each in stored_modules.items() if each is elem)
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(elems) == 1 else of_elem,
            "weights": {
                "num_bits": bits, "type": "float", "strategy": "group", "group_size": BLOCK,
                "symmetric": True, "dynamic": False, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8",
            },
            "input_activations": None, "output_activations": None, "format": word,
        }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMATS[elems[0]][0] if len(elems) == 1 else _MIXED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(set(ignored)),
    }


def parts(name: str, elem: torch.dtype) -> tuple[str, str]:
    """The names of the elements and scales of the weight `name`."""
    return name + (_PACKED if stored_elem(elem).packed else ""), name + SUFFIX


def _dtype_of(entries: Mapping[str, Entry], name: str) -> torch.dtype | None:
    return entries[name].dtype if name in entries else None


def read(checkpoint: Checkpoint) -> Iterator[Named]:
    """The weights of `checkpoint`. Raises `CheckpointError`."""
    entries = checkpoint.entries
    for name, entry in entries.items():
        base = name.removesuffix(SUFFIX) if name.endswith(SUFFIX) else ""
        if _dtype_of(entries, base) in FP8 or _dtype_of(entries, base + _PACKED) is torch.uint8:
            continue
        if entry.dtype in FP8:
            yield stored_weight(name, entry, entries.get(name + SUFFIX), entry.dtype)
        elif name.endswith(_PACKED) and entry.dtype is torch.uint8:
            base = name.removesuffix(_PACKED)
            yield stored_weight(base, entry, entries.get(base + SUFFIX), E2M1)
        else:
            yield as_it_is(entry)
