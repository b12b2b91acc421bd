"""The plan of a conversion for every tensor of a checkpoint: made from its model, before any is read.

    tensor of the file ─▶ parameter of the model, by Transformers' own renamings ─▶ what the policy decides

A tensor that the model reads through a conversion (experts one by one, stacked when loaded) is stored where
that keeps blocks of the last dimension whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mxcompile.checkpoint.files import Checkpoint, Entry, read_json
from mxcompile.checkpoint.layouts import FileLayout, layout_of, named
from mxcompile.checkpoint.load import architecture
from mxcompile.checkpoint.save import linears
from mxcompile.errors import CheckpointError
from mxcompile.formats import Format, stored_precision
from mxcompile.models.named import LoadedModel
from mxcompile.policy import Policy
from mxcompile.serving.choose import TABLE, StorageChoice
from mxcompile.serving.table import StoredWeight, StoredWeights
from mxcompile.serving.weights import chosen_weights, empty

_SOURCES = (torch.float32, torch.bfloat16, torch.float16)
_KEEPS_BLOCKS = frozenset({"MergeModulelist", "Concatenate"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """A conversion.

    checkpoint: what is converted. layout: of the result. chosen: for every weight of a linear layer or
    embedding in it, by name there. config: the config.json, if there is one. whole: linear layers of the
    model whose weights stay as they are. stored_modules: formats of the others, by their names in the
    checkpoint and in the model.
    """

    checkpoint: Checkpoint
    layout: FileLayout
    chosen: dict[str, StorageChoice]
    config: dict[str, Any]
    whole: tuple[str, ...]
    stored_modules: dict[str, Format]

    def table(self) -> StoredWeights:
        """Returns the entries of the result, from headers alone."""
        entries = self.checkpoint.entries
        return StoredWeights(weights=tuple(row(entries[name], each) for name, each in self.chosen.items()))

    @property
    def num_bytes(self) -> int:
        """Returns the size of all tensors of the result in bytes."""
        entries, rows = self.checkpoint.entries, self.table().weights
        return self.checkpoint.num_bytes - sum(entries[each.name].num_bytes - each.num_bytes for each in rows)


def row(entry: Entry, chosen: StorageChoice) -> StoredWeight:
    """Returns the row of one tensor, with its bytes after the conversion."""
    numel = torch.Size(entry.shape).numel()
    num_bytes, precision = entry.num_bytes, ""
    if chosen.form is not None:
        num_bytes, precision = _stored_bytes(entry, chosen.form), str(stored_precision(chosen.form))
    return StoredWeight(
        name=entry.name,
        role=chosen.role,
        shape=entry.shape,
        stored=bool(precision),
        reason=chosen.reason,
        num_bytes=num_bytes,
        bytes_bf16=2 * numel,
        precision=precision,
    )


def _stored_bytes(entry: Entry, form: Format) -> int:
    return empty(entry.shape, -1, form, torch.bfloat16, "meta").stored_bytes


def make_plan(
    source: Path, policy: Policy | str | dict[str, Any] | None, layout: str, given: LoadedModel | None
) -> Conversion:
    """The plan for the checkpoint at `source`. Raises `CheckpointError`, `ModelError`, `PolicyError`."""
    form, checkpoint = layout_of(layout), Checkpoint.open(source)
    quantized = next((weight for weight in named(checkpoint)[1] if weight.scales), None)
    if quantized is not None:
        label = stored_precision(quantized.form).label
        raise CheckpointError(f"{source}: {quantized.name!r} is stored in {label} already")
    config = read_json(source / "config.json") if (source / "config.json").is_file() else {}
    if "quantization_config" in config:
        raise CheckpointError(f"{source / 'config.json'}: has a quantization_config; it is quantized already")
    if given is None:
        if not config:
            raise CheckpointError(
                f"{source}: it has no config.json: say which model the weights are of, --model NAME"
            )
        given = _of_config(source, config)
    decided = chosen_weights(given.model, policy, given.args, given.kwargs)
    places = _places(given.model, checkpoint)
    choices: dict[str, StorageChoice] = {}
    for name, (path, reason) in places.items():
        if path in decided:
            choices[name] = _for_file(checkpoint.entries[name], decided[path], reason, form)
    forms = {name: each.form for name, each in choices.items() if each.form is not None}
    if not forms:
        raise CheckpointError(
            f"{source}: none of its weights can be stored in MXFP8, MXFP4 or NVFP4:"
            f" {_reasons(choices, decided)}"
        )
    in_model = {places[name][0]: form for name, form in forms.items()}
    parameters = given.model.named_parameters(remove_duplicate=False)
    stored = {id(value) for path, value in parameters if path in in_model}
    whole = linears(given.model, lambda weight: id(weight) not in stored)
    return Conversion(
        checkpoint=checkpoint,
        layout=form,
        chosen=choices,
        config=config,
        whole=tuple(whole),
        stored_modules={name.removesuffix(".weight"): form for name, form in {**forms, **in_model}.items()},
    )


def _reasons(choices: Mapping[str, StorageChoice], decided: Mapping[str, StorageChoice]) -> str:
    """Why no tensor is stored: what keeps those that the policy would store, else what it says."""
    wanted = any(each.form is not None for each in decided.values())
    policies = {each.reason for each in decided.values()}
    reasons = Counter(each.reason for each in choices.values() if not wanted or each.reason not in policies)
    return (
        "; ".join(f"{reason} ({number} of them)" for reason, number in reasons.most_common(3)) or "no matrix"
    )


def _of_config(source: Path, raw: dict[str, Any]) -> LoadedModel:
    owner, config = architecture(source, raw)
    with torch.device("meta"):
        return LoadedModel(
            name=str(source), model=owner(config).to(torch.bfloat16)
        )  # whose products are those with kernels


def _places(model: nn.Module, checkpoint: Checkpoint) -> dict[str, tuple[str, str]]:
    """For each tensor of `checkpoint` the parameter it ends in, and why blocks do not survive that, if so."""
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters(remove_duplicate=False)}
    if not hasattr(getattr(model, "config", None), "model_type"):
        return {name: _checked(entry, name, shapes) for name, entry in checkpoint.entries.items()}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    owner: Any = model
    transforms = get_model_conversion_mapping(owner)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    places = {}
    for name, entry in checkpoint.entries.items():
        path, pattern = rename_source_key(
            name, renamings, converters, owner.base_model_prefix, owner.state_dict()
        )
        if pattern is None:
            places[name] = _checked(entry, path, shapes)
        else:
            used = [each for each in converters if pattern in each.source_patterns]
            places[name] = path, _lost(used, len(shapes.get(path, ())))
    return places


def _checked(entry: Entry, path: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, str]:
    if path in shapes and shapes[path] != entry.shape:
        raise CheckpointError(
            f"{entry.file}: {entry.name!r} has shape {entry.shape}, the model's {shapes[path]}"
        )
    return path, ""


def _lost(converters: Sequence[Any], rank: int) -> str:
    """Why tensors that go through `converters` cannot be stored, "" if they can."""
    for step in (step for each in converters for step in each.operations):
        kind = type(step).__name__
        if kind not in _KEEPS_BLOCKS or (kind == "Concatenate" and step.dim % max(rank, 1) == rank - 1):
            return f"the model reads it through {kind}, which does not keep blocks"
    return ""


def _for_file(entry: Entry, chosen: StorageChoice, lost: str, layout: FileLayout) -> StorageChoice:
    """`chosen`, of a parameter, for the tensor of the file."""
    if chosen.form is None:
        return chosen
    reason = lost
    if chosen.apart:  # a checkpoint has one tensor for both
        reason = f"{chosen.reason.partition(';')[0]}, but {TABLE}"
    if entry.dtype not in _SOURCES:
        reason = f"its dtype is {str(entry.dtype).removeprefix('torch.')}"
    reason = reason or layout.obstacle(entry.name, entry.shape, chosen.block_dim, chosen.form)
    return replace(chosen, form=None, reason=reason) if reason else replace(chosen, block_dim=-1)
