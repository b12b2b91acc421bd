"""`convert`: stores the weights of a checkpoint in the policy's formats, shard by shard.

    header ─▶ plan;  for each file: read a weight, cast it, write the file, read it back, measure;  publish
    plan: weight of the file ─▶ parameter, by Transformers' own renamings ─▶ the policy's decision

A weight that the model reads through a conversion (single experts, stacked at load) is stored if the
conversion keeps blocks of the last dimension whole. A weight that the checkpoint stores quantized stays
quantized: it keeps its qdata and scales if the policy decides its format, and is cast from its values
otherwise. The input is only read. The output is written to a temporary directory, which is renamed at the
end.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from mxcompile.checkpoint.declared import HF_QUANT_CONFIG
from mxcompile.checkpoint.files import (
    INDEX,
    PICKLES,
    Checkpoint,
    new_directory,
    read_json,
    write_json,
    write_tensors,
)
from mxcompile.checkpoint.layouts import COMPRESSED_TENSORS, FileLayout, layout_of, readers, weights_in
from mxcompile.checkpoint.load import architecture, check_cover, value_dtype
from mxcompile.checkpoint.save import packed, quantization_config, write_index
from mxcompile.checkpoint.weight_entries import MXINT8
from mxcompile.errors import CheckpointError
from mxcompile.formats import stored_labels, stored_precision
from mxcompile.models.named import LoadedModel
from mxcompile.policy import Policy
from mxcompile.serving.plan import TABLE, planned_weights
from mxcompile.storage import MXTensor
from mxcompile.storage.cast import cast, empty, sqnr_db
from mxcompile.storage.weights import StoredWeight, StoredWeights

REPORT = "mxfp8_weights.json"
_SKIPPED = PICKLES | {".safetensors", ".part"}
_REPLACED = frozenset({"config.json", HF_QUANT_CONFIG, INDEX, REPORT})
_SOURCES = (torch.float32, torch.bfloat16, torch.float16)
_KEEPS_BLOCKS = frozenset({"MergeModulelist", "Concatenate"})


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
        CheckpointError: The input is damaged, lacks a tensor of the model, or has a quantized weight that
            would not be stored; or `target` exists or cannot be written.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """The plan of a conversion.

    sources: the weights of the checkpoint by name. weights: the decision for each weight of a linear layer or
    embedding, by the same name. config: config.json of the result, empty if the checkpoint has none. dtype:
    dtype of the values of weights that the checkpoint stores quantized.
    """

    sources: Mapping[str, StoredWeight]
    weights: Mapping[str, StoredWeight]
    config: dict[str, Any]
    dtype: torch.dtype


def plan_conversion(
    checkpoint: Checkpoint,
    policy: Policy | str | dict[str, Any] | None,
    layout: FileLayout,
    loaded: LoadedModel | None,
) -> Conversion:
    """Returns the plan of the conversion of `checkpoint` to `layout`.

    loaded: the model; None if the checkpoint has a Hugging Face config.json. Raises `CheckpointError` if the
    checkpoint does not fit the model, has no weight that can be stored, or has a quantized weight that would
    not be stored. Raises `ModelError` and `PolicyError` as `planned_weights`.
    """
    source = checkpoint.path
    sources = {weight.name: weight for weight in weights_in(checkpoint)[1] if weight.is_read}
    config = read_json(source / "config.json") if (source / "config.json").is_file() else {}
    if loaded is None:
        if not config:
            raise CheckpointError(
                f"{source}: it has no config.json: pass the model of these weights, --model NAME"
            )
        owner, model_config = architecture(source, config)
        with torch.device("meta"):  # BF16, because BF16 products have kernels
            loaded = LoadedModel(name=str(source), model=owner(model_config).to(torch.bfloat16))
    dtype = value_dtype(checkpoint, config)
    decided = planned_weights(loaded.model, policy, loaded.args, loaded.kwargs)
    places = _places(loaded.model, checkpoint, sources)
    weights = {
        name: _for_file(sources[name], decided[path], reason, layout, dtype)
        for name, (path, reason) in places.items()
        if path in decided
    }
    if not any(weight.stored for weight in weights.values()):  # limits of the layout, or else of the policy
        wanted = any(weight.stored for weight in decided.values())
        policies = {weight.reason for weight in decided.values()}
        limits = Counter(w.reason for w in weights.values() if not wanted or w.reason not in policies)
        reasons = "; ".join(f"{reason} ({number} of them)" for reason, number in limits.most_common(3))
        raise CheckpointError(
            f"{source}: none of its weights can be stored in {stored_labels()}: {reasons or 'no matrix'}"
        )
    for name, stored_weight in sources.items():  # unquantized, such a weight would take more bytes
        weight = weights.get(name)
        if stored_weight.form is not None and (weight is None or weight.form is None):
            label = stored_precision(stored_weight.form).label
            reason = "no layer of the model reads it" if weight is None else weight.reason
            raise CheckpointError(
                f"{source}: {name!r} is in {label}, and the result would not have it quantized ({reason}):"
                " add a rule that stores it, or choose another layout"
            )
    config.pop("quantization_config", None)
    if config and layout.config is not None:
        state = {name: blank(weight, weights.get(name)) for name, weight in sources.items()}
        stored = {places[name][0]: state[name] for name, weight in weights.items() if weight.stored}
        modules = _modules(loaded.model, stored)
        config["quantization_config"] = quantization_config(layout.config, state, modules)
    return Conversion(sources=sources, weights=weights, config=config, dtype=dtype)


def blank(source: StoredWeight, weight: StoredWeight | None) -> Tensor:
    """Returns the converted tensor of `source` on the meta device, which has shape and format only."""
    if weight is None or weight.form is None:
        return torch.empty(source.shape, dtype=source.dtype, device="meta")
    return empty(source.shape, weight.block_dim, weight.form, weight.dtype or torch.bfloat16, "meta")


def _modules(model: nn.Module, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of the modules of `model`; tensors of `stored` replace its parameters."""
    parameters = model.named_parameters(remove_duplicate=False)
    by_identity = {id(value): stored[path] for path, value in parameters if path in stored}
    linears = ((name, linear) for name, linear in model.named_modules() if isinstance(linear, nn.Linear))
    return {
        **{path.removesuffix(".weight"): value for path, value in stored.items()},
        **{name: by_identity.get(id(linear.weight), linear.weight) for name, linear in linears},
    }


def _places(
    model: nn.Module, checkpoint: Checkpoint, sources: Mapping[str, StoredWeight]
) -> dict[str, tuple[str, str]]:
    """Returns for each weight of `checkpoint` its parameter, and why loading it breaks blocks, or "".

    Raises `CheckpointError` if the weights do not cover `model`.
    """
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters(remove_duplicate=False)}
    if not hasattr(getattr(model, "config", None), "model_type"):
        check_cover(checkpoint.path, model, sources)
        return {name: _checked(checkpoint, source, name, shapes) for name, source in sources.items()}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    owner: Any = model
    transforms = get_model_conversion_mapping(owner)
    renamings = [step for step in transforms if isinstance(step, WeightRenaming)]
    converters = [step for step in transforms if isinstance(step, WeightConverter)]
    places, split = {}, list[str]()
    for name, source in sources.items():
        path, pattern = rename_source_key(
            name, renamings, converters, owner.base_model_prefix, owner.state_dict()
        )
        if pattern is None:
            places[name] = _checked(checkpoint, source, path, shapes)
        else:
            used = [step for step in converters if pattern in step.source_patterns]
            places[name] = path, _lost(used, len(shapes.get(path, ())))
            split += [name for step in used if step.target_patterns[1:] for name in step.target_patterns]
    check_cover(checkpoint.path, model, {path for path, _ in places.values()}, {*split})
    return places


def _checked(
    checkpoint: Checkpoint, source: StoredWeight, path: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[str, str]:
    if path in shapes and shapes[path] != source.shape:
        file = checkpoint.entries[source.tensors[0]].file
        raise CheckpointError(f"{file}: {source.name!r} has shape {source.shape}, the model's {shapes[path]}")
    return path, ""


def _lost(converters: Sequence[Any], rank: int) -> str:
    """Returns why tensors that go through `converters` cannot be stored, "" if they can."""
    for step in (step for converter in converters for step in converter.operations):
        kind = type(step).__name__
        if kind not in _KEEPS_BLOCKS or (kind == "Concatenate" and step.dim % max(rank, 1) == rank - 1):
            return f"the model reads it through {kind}, which does not keep blocks"
    return ""


def _for_file(
    source: StoredWeight, weight: StoredWeight, lost: str, layout: FileLayout, dtype: torch.dtype
) -> StoredWeight:
    """Returns the decision for a weight of a file that becomes the parameter `weight`, or a part of it."""
    dtype = source.dtype or dtype
    in_file = replace(
        weight, name=source.name, shape=source.shape, dtype=dtype, held_bytes=None, keeps_table=False
    )
    if weight.form is None:
        return in_file
    reason = lost
    if weight.keeps_table or (weight.is_table and weight.form.stored != MXINT8):
        # a checkpoint has one tensor for table and layer, and other tools read the rows as values
        reason = f"{weight.reason.partition(';')[0]}, but {TABLE}"
    if dtype not in _SOURCES:
        reason = f"its dtype is {str(dtype).removeprefix('torch.')}"
    reason = reason or layout.obstacle(in_file)
    return replace(in_file, form=None, reason=reason) if reason else replace(in_file, block_dim=-1)
