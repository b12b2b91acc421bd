"""Reads layouts whose weights are separate tensors: elements, scales, and a global scale.

    elements        x in FP8, or in int8 for MXINT8; x or x_packed in uint8 with two E2M1 elements in a byte
                    (int8 in DeepSeek-V4)
    scales          x_scale, x_scale_inv, or m.scale for x = m.weight
    global scale    x_global_scale divides the scales, x_scale_2 multiplies them
    GPT-OSS         x_blocks (bytes of two E2M1, [E, N, K/32, 16]), x_scales (uint8, [E, N, K/32]) of experts,
                    x [E, K, N] in models

The format follows from dtypes and shapes; the configuration (`declared`) is checked against them. Formats of
activations are not read, because the policy decides how activations are cast.

Source: compressed_tensors.compressors (0.20), modelopt.torch.export (0.47), auto_round.export (0.16),
transformers.integrations.finegrained_fp8 and .mxfp4 (5.24).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from mxcompile.checkpoint.declared import Declared, declared, quantization_config, quantizes_attention
from mxcompile.checkpoint.files import Checkpoint, Entry
from mxcompile.checkpoint.weight_entries import BYTES, FP8, MXFP4, MXINT8, SUFFIX, plain_weight, stored_weight
from mxcompile.errors import CheckpointError
from mxcompile.formats import BLOCK, Format
from mxcompile.storage.weights import StoredWeight

PACKED, GLOBAL, MULTIPLIER = "_packed", "_global_scale", "_scale_2"
_WEIGHT, _ZERO_POINT = "weight", "_zero_point"
_BLOCKS, _SCALES = "_blocks", "_scales"
_INPUT_FACTOR = "pre_quant_scale"  # ModelOpt's AWQ

_ATTENTION = frozenset({f"{x}{suffix}" for x in ("q", "k", "v", "kv") for suffix in (SUFFIX, GLOBAL)})
_ACTIVATIONS = _ATTENTION | {f"input{GLOBAL}", "input_scale", "activation_scale", "output_scale"}
"""Names of scales of activations in a module."""


def parts(name: str, form: Format) -> tuple[str, ...]:
    """Returns the names of a weight's tensors in compressed-tensors: elements, scales, and global scale."""
    whole = (name + GLOBAL,) if form.two_level else ()
    return (name + (PACKED if form.elem.packed else ""), name + SUFFIX, *whole)


def read(checkpoint: Checkpoint) -> Iterator[StoredWeight]:
    """Yields the weights of `checkpoint`. Raises `CheckpointError`."""
    source, config = quantization_config(checkpoint)
    about = declared(source, config)
    anywhere = _ATTENTION if quantizes_attention(config) else frozenset[str]()
    stored = _stored(checkpoint.entries, about)
    owners = {part: weight for weight in stored for part in weight.tensors}
    modules = {weight.name.rpartition(".")[0] for weight in stored}
    for name, entry in checkpoint.entries.items():
        weight = owners.get(name)
        if weight is None:
            module, _, attribute = name.rpartition(".")
            of_inputs = attribute in anywhere or (attribute in _ACTIVATIONS and module in modules)
            if attribute == _INPUT_FACTOR:
                raise CheckpointError(f"{entry} scales inputs of its layer, which mxcompile does not do")
            if not of_inputs and (base := _scaled(checkpoint.entries, name)):
                raise CheckpointError(f"{entry} is a scale, but {base} is not a stored weight")
            weight = plain_weight(entry, is_read=not of_inputs)
        elif name != weight.tensors[0]:
            continue
        about.check(weight)
        yield weight


def _stored(entries: Mapping[str, Entry], about: Declared) -> list[StoredWeight]:
    """Returns the quantized weights, after a check of their tensors."""
    bases = {
        name.removesuffix(PACKED): name for name, entry in entries.items() if entry.dtype in (*FP8, *BYTES)
    }
    parts = {part for base in bases for part in _scale_names(base)}
    weights = []
    for base, name in bases.items():
        if name in parts:
            continue  # E4M3 or byte scales of another weight
        entry = entries[name]
        if entry.dtype is torch.int8 and MXFP4 in about.forms and MXINT8 not in about.forms:
            entry = replace(entry, dtype=torch.uint8)  # two elements of FP4 in a byte
        scales = _present(entries, _scale_names(base))
        if not scales and entry.dtype not in FP8 and base == name:
            continue  # bytes that are not packed elements
        if base + _ZERO_POINT in entries:
            raise CheckpointError(f"{entry} has zero points, which are not read")
        wholes = _present(entries, (base + GLOBAL, base + MULTIPLIER))
        for several in (scales, wholes):
            if len(several) > 1:
                names = " and ".join(repr(part.name) for part in several)
                raise CheckpointError(f"{entry} has several scales: {names}")
        scale, whole = (next(iter(several), None) for several in (scales, wholes))
        tile = about.tile if entry.dtype in FP8 else None
        weights.append(
            stored_weight(base, entry, scale, global_scale=whole, tile=tile, scale_type=about.scale_type)
        )
    return weights


def _scale_names(base: str) -> tuple[str, ...]:
    """Returns the names that the scales of the weight `base` may have."""
    module, dot, attribute = base.rpartition(".")
    of_module = (f"{module}{dot}scale",) if attribute == _WEIGHT else ()
    return (base + SUFFIX, f"{base}{SUFFIX}_inv", *of_module)


def _present(entries: Mapping[str, Entry], names: tuple[str, ...]) -> list[Entry]:
    return [entries[name] for name in names if name in entries]


def _scaled(entries: Mapping[str, Entry], name: str) -> str:
    """Returns the weight of the scale `name`, for a message, or "" if `name` is not a name of scales."""
    for suffix in (MULTIPLIER, GLOBAL, f"{SUFFIX}_inv", SUFFIX):
        base = name.removesuffix(suffix)
        if base != name and (base in entries or base.endswith(f".{_WEIGHT}")):
            return repr(base)
    return ""


def is_gpt_oss(entry: Entry) -> bool:
    """Whether `entry` has elements of experts in GPT-OSS's layout."""
    bytes_ = BLOCK // MXFP4.elem.per_byte
    return entry.name.endswith(_BLOCKS) and entry.dtype is torch.uint8 and entry.shape[3:] == (bytes_,)


def read_gpt_oss(checkpoint: Checkpoint) -> Iterator[StoredWeight]:
    """Yields the weights of `checkpoint`, whose experts are GPT-OSS's. Raises `CheckpointError`."""
    entries = checkpoint.entries
    for name, entry in entries.items():
        base = name.removesuffix(_BLOCKS)
        if is_gpt_oss(entry):
            scale = entries.get(base + _SCALES)
            if scale is None or scale.dtype is not torch.uint8 or scale.shape != entry.shape[:3]:
                raise CheckpointError(f"{entry} has no scales of its blocks: {base + _SCALES!r}")
            experts, n, blocks, _ = entry.shape
            yield StoredWeight(
                name=base,
                shape=(experts, blocks * BLOCK, n),
                form=MXFP4,
                block_dim=-2,
                tensors=(name, scale.name),
            )
        elif not (name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in entries):
            yield plain_weight(entry)
