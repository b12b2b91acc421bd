"""GPT-OSS's own layout of experts, which is read but not written.

    x_blocks (bytes of two E2M1, [E, N, K/32, 16]), x_scales (uint8, [E, N, K/32])  →  x [E, K, N] in models

Source: transformers.integrations.mxfp4 (5.24).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mxcompile.checkpoint.files import Checkpoint, Entry
from mxcompile.checkpoint.weight_entries import MXFP4, plain_weight
from mxcompile.errors import CheckpointError
from mxcompile.formats import BLOCK
from mxcompile.storage.weights import StoredWeight

_BLOCKS, _SCALES = "_blocks", "_scales"


def is_blocks(entry: Entry) -> bool:
    """Whether `entry` has elements of experts in GPT-OSS's layout."""
    bytes_ = BLOCK // MXFP4.elem.per_byte
    return entry.name.endswith(_BLOCKS) and entry.dtype is torch.uint8 and entry.shape[3:] == (bytes_,)


def read(checkpoint: Checkpoint) -> Iterator[StoredWeight]:
    """Yields the weights of `checkpoint`. Raises `CheckpointError`."""
    entries = checkpoint.entries
    for name, entry in entries.items():
        base = name.removesuffix(_BLOCKS)
        if is_blocks(entry):
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
