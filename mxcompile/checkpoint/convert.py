"""`convert`: stores the weights of a checkpoint in the policy's formats, shard by shard.

    header ─▶ plan;  for each file: read a weight, cast it, write the file, read it back, measure;  publish

A weight that is stored in the wanted format already keeps its qdata and scales. The input is only read. The
output is written to a temporary directory, which is renamed at the end.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from mxcompile.checkpoint.declared import HF_QUANT_CONFIG
from mxcompile.checkpoint.files import INDEX, PICKLES, Checkpoint
from mxcompile.checkpoint.layouts import COMPRESSED_TENSORS, FileLayout, layout_of, readers
from mxcompile.checkpoint.plan import Conversion, blank, plan_conversion
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
_REPLACED = frozenset({"config.json", HF_QUANT_CONFIG, INDEX, REPORT})


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
        source: A directory of safetensors with a Hugging Face config.json, or any safetensors of `model`. Its
            weights may be quantized already, in a layout that `load_quantized` reads.
        target: The directory to write, which must not exist.
        policy: A preset, file, dict or `Policy`; by default the preset ``inference``.
        layout: As for `save_quantized`.
        model: The model, if `source` has no config.json.
        progress: Whether to show a progress bar on a terminal.

    Returns:
        The decision for every weight.

    Raises:
        CheckpointError: The input is damaged, or has a quantized weight that would not be stored; or `target`
            exists or cannot be written.
    """
    source, target = Path(source), Path(target).absolute()
    form, checkpoint = layout_of(layout), Checkpoint.open(source)
    plan = plan_conversion(checkpoint, policy, form, model)
    reading = readers(checkpoint, plan.dtype)
    if source.is_dir() and source.resolve() in (target.resolve(), *target.resolve().parents):
        raise CheckpointError(f"{target}: lies in the input, which must not change: name another directory")
    with new_directory(target) as partial:
        steps = 2 * len(plan.sources)  # every weight is written, then measured
        hidden = None if progress else True
        with tqdm(desc="convert", total=steps, unit="tensor", disable=hidden, leave=False) as bar:
            rows: list[StoredWeight] = []
            files = {name: checkpoint.entries[row.tensors[0]].file for name, row in plan.sources.items()}
            for file in checkpoint.files:
                bar.set_description(f"convert {file.name}")
                names = [name for name, path in files.items() if path == file]
                if names:  # a file can have scales only
                    rows += _convert_file(names, reading, partial / file.name, plan, form, bar.update)
        write_index(partial)
        for file in sorted(source.iterdir()) if source.is_dir() else ():
            skipped = file.suffix in _SKIPPED or file.name in _REPLACED
            if file.is_file() and not file.name.startswith(".") and not skipped:
                shutil.copyfile(file, partial / file.name)
        if plan.config:
            write_json(partial / "config.json", plan.config)
        write_json(partial / REPORT, [row.to_dict() for row in rows])
    return StoredWeights(weights=tuple(rows))


def _convert_file(
    names: Iterable[str],
    reading: Mapping[str, Callable[[], Tensor]],
    output: Path,
    plan: Conversion,
    layout: FileLayout,
    on_tensor: Callable[[], object],
) -> Iterator[StoredWeight]:
    """Writes the weights `names`, converted, to `output`. Yields them, with SQNR measured on `output`."""
    weights = plan.weights
    state = {name: blank(plan.sources[name], weights.get(name)) for name in names}

    def parts() -> Iterator[tuple[str, Tensor]]:
        for name, result in state.items():
            value = reading[name]()
            if isinstance(result, MXTensor) and not (
                isinstance(value, MXTensor) and value.form == result.form
            ):
                value = cast(value, -1, weights[name].form or result.form)
            yield from layout.pack(name, value).items()
            on_tensor()

    write_tensors(output, packed(state, layout), parts(), layout.metadata(state))
    written = readers(Checkpoint.open(output), torch.float32)
    for name, result in state.items():
        on_tensor()
        if name in weights and isinstance(result, MXTensor):
            value = written[name]()
            assert isinstance(value, MXTensor)
            yield replace(weights[name], sqnr_db=sqnr_db(reading[name](), value))
        elif name in weights:
            yield weights[name]
