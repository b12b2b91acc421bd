"""The plan of a checkpoint's conversion, derived from the model before any tensor is read.

    tensor of the file ─▶ parameter of the model, by Transformers' own renamings ─▶ the policy's decision

A tensor that the model reads through a conversion (single experts, stacked at load) is stored if the
conversion keeps blocks of the last dimension whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mxcompile.checkpoint.files import Checkpoint, Entry, read_json
from mxcompile.checkpoint.layouts import FileLayout, weights_in
from mxcompile.checkpoint.load import architecture
from mxcompile.checkpoint.save import quantization_config
from mxcompile.checkpoint.weight_entries import MXINT8
from mxcompile.errors import CheckpointError
from mxcompile.formats import stored_labels, stored_precision
from mxcompile.models.named import LoadedModel
from mxcompile.policy import Policy
from mxcompile.serving.plan import TABLE, planned_weights
from mxcompile.storage.cast import empty
from mxcompile.storage.weights import StoredWeight

_SOURCES = (torch.float32, torch.bfloat16, torch.float16)
_KEEPS_BLOCKS = frozenset({"MergeModulelist", "Concatenate"})


def plan_conversion(
    checkpoint: Checkpoint,
    policy: Policy | str | dict[str, Any] | None,
    layout: FileLayout,
    loaded: LoadedModel | None,
) -> tuple[dict[str, StoredWeight], dict[str, Any]]:
    """Returns the weights of a converted checkpoint, and its config.json.

    Args:
        checkpoint: The checkpoint to convert.
        policy: The policy that decides.
        layout: Layout of the result.
        loaded: The model; None if the checkpoint has a Hugging Face config.json.

    Returns:
        Every weight of a linear layer or embedding, by its name in the checkpoint; and the config.json, empty
        if the checkpoint has none.

    Raises:
        CheckpointError: The checkpoint is quantized already, does not fit the model, or has no weight that
            can be stored.
        ModelError: The model cannot be traced.
        PolicyError: The policy stores no weight.
    """
    source = checkpoint.path
    for weight in weights_in(checkpoint)[1]:
        if weight.form is not None:
            label = stored_precision(weight.form).label
            raise CheckpointError(f"{source}: {weight.name!r} is stored in {label} already")
    config = read_json(source / "config.json") if (source / "config.json").is_file() else {}
    if "quantization_config" in config:
        raise CheckpointError(f"{source / 'config.json'}: has a quantization_config; it is quantized already")
    if loaded is None:
        if not config:
            raise CheckpointError(
                f"{source}: it has no config.json: pass the model of these weights, --model NAME"
            )
        loaded = _of_config(source, config)
    decided = planned_weights(loaded.model, policy, loaded.args, loaded.kwargs)
    places = _places(loaded.model, checkpoint)
    weights = {
        name: _for_file(checkpoint.entries[name], decided[path], reason, layout)
        for name, (path, reason) in places.items()
        if path in decided
    }
    if not any(weight.stored for weight in weights.values()):
        raise CheckpointError(
            f"{source}: none of its weights can be stored in {stored_labels()}: {_reasons(weights, decided)}"
        )
    if config and layout.config is not None:
        state = {name: blank(entry, weights.get(name)) for name, entry in checkpoint.entries.items()}
        stored = {places[name][0]: state[name] for name, weight in weights.items() if weight.stored}
        modules = _modules(loaded.model, stored)
        config["quantization_config"] = quantization_config(layout.config, state, modules)
    return weights, config


def blank(entry: Entry, weight: StoredWeight | None) -> Tensor:
    """Returns the converted tensor of `entry` on the meta device, which has shape and format only."""
    if weight is None or weight.form is None:
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")
    return empty(entry.shape, weight.block_dim, weight.form, entry.dtype, "meta")


def _modules(model: nn.Module, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of the modules of `model`; tensors of `stored` replace its parameters."""
    parameters = model.named_parameters(remove_duplicate=False)
    by_identity = {id(value): stored[path] for path, value in parameters if path in stored}
    linears = ((name, linear) for name, linear in model.named_modules() if isinstance(linear, nn.Linear))
    return {
        **{path.removesuffix(".weight"): value for path, value in stored.items()},
        **{name: by_identity.get(id(linear.weight), linear.weight) for name, linear in linears},
    }


def _reasons(weights: Mapping[str, StoredWeight], decided: Mapping[str, StoredWeight]) -> str:
    """Returns why no tensor is stored: limits of the layout, or else the reasons of the policy."""
    wanted = any(weight.stored for weight in decided.values())
    policies = {weight.reason for weight in decided.values()}
    reasons = Counter(w.reason for w in weights.values() if not wanted or w.reason not in policies)
    return (
        "; ".join(f"{reason} ({number} of them)" for reason, number in reasons.most_common(3)) or "no matrix"
    )


def _of_config(source: Path, raw: dict[str, Any]) -> LoadedModel:
    owner, config = architecture(source, raw)
    with torch.device("meta"):  # BF16, because BF16 products have kernels
        return LoadedModel(name=str(source), model=owner(config).to(torch.bfloat16))


def _places(model: nn.Module, checkpoint: Checkpoint) -> dict[str, tuple[str, str]]:
    """Returns for each tensor of `checkpoint` its parameter, and why loading it breaks blocks, or ""."""
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters(remove_duplicate=False)}
    if not hasattr(getattr(model, "config", None), "model_type"):
        return {name: _checked(entry, name, shapes) for name, entry in checkpoint.entries.items()}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    owner: Any = model
    transforms = get_model_conversion_mapping(owner)
    renamings = [step for step in transforms if isinstance(step, WeightRenaming)]
    converters = [step for step in transforms if isinstance(step, WeightConverter)]
    places = {}
    for name, entry in checkpoint.entries.items():
        path, pattern = rename_source_key(
            name, renamings, converters, owner.base_model_prefix, owner.state_dict()
        )
        if pattern is None:
            places[name] = _checked(entry, path, shapes)
        else:
            used = [step for step in converters if pattern in step.source_patterns]
            places[name] = path, _lost(used, len(shapes.get(path, ())))
    return places


def _checked(entry: Entry, path: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, str]:
    if path in shapes and shapes[path] != entry.shape:
        raise CheckpointError(
            f"{entry.file}: {entry.name!r} has shape {entry.shape}, the model's {shapes[path]}"
        )
    return path, ""


def _lost(converters: Sequence[Any], rank: int) -> str:
    """Returns why tensors that go through `converters` cannot be stored, "" if they can."""
    for step in (step for converter in converters for step in converter.operations):
        kind = type(step).__name__
        if kind not in _KEEPS_BLOCKS or (kind == "Concatenate" and step.dim % max(rank, 1) == rank - 1):
            return f"the model reads it through {kind}, which does not keep blocks"
    return ""


def _for_file(entry: Entry, weight: StoredWeight, lost: str, layout: FileLayout) -> StoredWeight:
    """Returns the decision for a tensor of a file that becomes the parameter `weight`, or a part of it."""
    in_file = replace(weight, name=entry.name, shape=entry.shape, dtype=entry.dtype, keeps_table=False)
    if weight.form is None:
        return in_file
    reason = lost
    if weight.keeps_table or (weight.is_table and weight.form.stored != MXINT8):
        # a checkpoint has one tensor for table and layer, and other tools read the rows as values
        reason = f"{weight.reason.partition(';')[0]}, but {TABLE}"
    if entry.dtype not in _SOURCES:
        reason = f"its dtype is {str(entry.dtype).removeprefix('torch.')}"
    reason = reason or layout.obstacle(in_file)
    return replace(in_file, form=None, reason=reason) if reason else replace(in_file, block_dim=-1)
