"""`convert`: stores the weights of a checkpoint in the policy's formats, shard by shard.

    header ─▶ plan;  for each file: read a tensor, cast it, write the file, read it back, measure;  publish

The input is only read. The output is written to a temporary directory, which is renamed at the end.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from mxcompile.checkpoint.files import INDEX, PICKLES, Checkpoint
from mxcompile.checkpoint.layouts import COMPRESSED_TENSORS, FileLayout, layout_of, readers
from mxcompile.checkpoint.plan import blank, plan_conversion
from mxcompile.checkpoint.publish import new_directory, write_json, write_tensors
from mxcompile.checkpoint.save import packed, write_index
from mxcompile.errors import CheckpointError
from mxcompile.models.named import LoadedModel
from mxcompile.policy import Policy
from mxcompile.storage import MXTensor
from mxcompile.storage.cast import cast, sqnr_db
from mxcompile.storage.weights import StoredWeight, StoredWeights

REPORT = "mxfp8_weights.json"
_SKIPPED = PICKLES | {".safetensors", ".part"}


def convert(
    source: str | Path,
    target: str | Path,
    *,
    policy: Policy | str | dict[str, Any] | None = None,
    layout: str = COMPRESSED_TENSORS,
    model: LoadedModel | None = None,
    progress: bool = True,
) -> StoredWeights:
    """Writes the checkpoint `source` to `target`, with its weights stored as the policy decides.

    The directory appears completely or not at all. The SQNR of every stored weight is measured on the written
    file; ``mxfp8_weights.json`` in the directory has the table.

    Args:
        source: A directory of safetensors with a Hugging Face config.json, or any safetensors of `model`.
        target: The directory to write, which must not exist.
        policy: A preset, file, dict or `Policy`; by default the preset ``inference``.
        layout: As for `save_quantized`.
        model: The model, if `source` has no config.json.
        progress: Whether to show a progress bar on a terminal.

    Returns:
        The decision for every weight.

    Raises:
        CheckpointError: The input is damaged or already quantized, or `target` exists or cannot be written.
    """
    source, target = Path(source), Path(target).absolute()
    form, checkpoint = layout_of(layout), Checkpoint.open(source)
    weights, config = plan_conversion(checkpoint, policy, form, model)
    if source.is_dir() and source.resolve() in (target.resolve(), *target.resolve().parents):
        raise CheckpointError(f"{target}: lies in the input, which must not change: name another directory")
    with new_directory(target) as partial:
        steps = 2 * len(checkpoint.entries)  # every tensor is written, then measured
        hidden = None if progress else True
        with tqdm(desc="convert", total=steps, unit="tensor", disable=hidden, leave=False) as bar:
            rows: list[StoredWeight] = []
            for file in checkpoint.files:
                bar.set_description(f"convert {file.name}")
                output = partial / file.name
                rows += _convert_file(checkpoint, file, output, weights, form, bar.update)
        write_index(partial)
        for file in sorted(source.iterdir()) if source.is_dir() else ():
            skipped = file.suffix in _SKIPPED or file.name in ("config.json", INDEX)
            if file.is_file() and not file.name.startswith(".") and not skipped:
                shutil.copyfile(file, partial / file.name)
        if config:
            write_json(partial / "config.json", config)
        write_json(partial / REPORT, [row.to_dict() for row in rows])
    return StoredWeights(weights=tuple(rows))


def _convert_file(
    checkpoint: Checkpoint,
    file: Path,
    output: Path,
    weights: Mapping[str, StoredWeight],
    layout: FileLayout,
    on_tensor: Callable[[], object],
) -> Iterator[StoredWeight]:
    """Writes `file`, converted, to `output`. Yields its weights, with SQNR measured on `output`."""
    entries = [entry for entry in checkpoint.entries.values() if entry.file == file]
    state = {entry.name: blank(entry, weights.get(entry.name)) for entry in entries}

    def parts() -> Iterator[tuple[str, Tensor]]:
        for name, result in state.items():
            value = checkpoint.read(name)
            if isinstance(result, MXTensor):
                value = cast(value, result.block_dim, result.form)
            yield from layout.pack(name, value).items()
            on_tensor()

    write_tensors(output, packed(state, layout), parts(), layout.metadata(state))
    reading = readers(Checkpoint.open(output), torch.float32)
    for name, result in state.items():
        on_tensor()
        if name in weights and isinstance(result, MXTensor):
            value = reading[name]()
            assert isinstance(value, MXTensor)
            yield replace(weights[name], sqnr_db=sqnr_db(checkpoint.read(name), value))
        elif name in weights:
            yield weights[name]
