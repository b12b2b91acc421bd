"""`save_quantized`: writes a model with stored weights as a safetensors checkpoint for other projects."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mxcompile.checkpoint.files import INDEX, Checkpoint, new_directory, write_json, write_tensors
from mxcompile.checkpoint.layouts import COMPRESSED_TENSORS, Config, FileLayout, layout_of
from mxcompile.checkpoint.weight_entries import MXINT8
from mxcompile.errors import CheckpointError
from mxcompile.formats import stored_labels
from mxcompile.models.names import user_path
from mxcompile.models.wrappers import user_model
from mxcompile.storage.tensor import MXTensor, stored_bytes

log = logging.getLogger(__name__)


def save_quantized(
    model: nn.Module,
    directory: str | Path,
    *,
    layout: str = COMPRESSED_TENSORS,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a model with stored weights to a directory, with the configs of a Hugging Face model.

    The directory appears completely or not at all. Hugging Face models are written with the tensor names of
    their published checkpoints.

    Args:
        model: The model.
        directory: The directory, which must not exist.
        layout: ``compressed-tensors`` (``mxfp8-quantized``, ``mxfp4-pack-quantized``,
            ``nvfp4-pack-quantized``; Transformers and vLLM load it), ``torchao``, without NVFP4, or
            ``modelopt`` or ``mxfp8``, with MXFP8 alone.
        max_shard_bytes: Size limit of a file in bytes.

    Raises:
        CheckpointError: The model has no stored weight, the directory exists or cannot be written, or the
            layout does not support a weight.

    Examples:
        >>> mxcompile.quantize_weights_(model)
        >>> mxcompile.save_quantized(model, "Llama-3-8B-MXFP8")
    """
    form = layout_of(layout)
    model, target = user_model(model), Path(directory).absolute()
    if target.exists():
        raise CheckpointError(f"{target}: exists already: name another directory")
    state = published(model, {name: value.detach() for name, value in state_of(model).items()})
    if not any(isinstance(value, MXTensor) for value in state.values()):
        raise CheckpointError(
            f"no weight of the model is stored in {stored_labels()}: quantize_weights_ stores them, and"
            " save_pretrained or safetensors writes an ordinary model"
        )
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            log.warning("%s is a %s, which no checkpoint contains", name, type(value).__name__)
    for name, layer in model.named_modules():
        table = layer.weight if isinstance(layer, nn.Embedding) else None
        if isinstance(table, MXTensor) and table.form.stored != MXINT8:
            log.warning(
                "%s is an embedding, whose codes mxcompile.load_quantized reads. Other tools take them for"
                " values. A policy rule can keep its table: match role embedding, use bf16",
                user_path(name),
            )
    with new_directory(target) as partial:
        _write_shards(partial, state, form, max_shard_bytes)
        _write_configs(partial, model, state, form)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors of the state of `model`, shared tensors once, by the user's names."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if isinstance(value, Tensor):  # an extra state can be anything
            first.setdefault(id(value), name)
    return {user_path(name): state[name] for name in first.values()}


def published(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns `state`, for a Hugging Face model with the tensor names of its published checkpoint."""
    if not hasattr(getattr(model, "config", None), "model_type"):
        return state
    from transformers.core_model_loading import revert_weight_conversion

    reverted: dict[str, Tensor] = revert_weight_conversion(model, state)
    return reverted


def _write_shards(directory: Path, state: Mapping[str, Tensor], layout: FileLayout, limit: int) -> None:
    """Writes `state` to files of at most `limit` bytes; a larger tensor has a file of its own."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, value in state.items():
        value_bytes = stored_bytes(value)
        if shards[-1] and size + value_bytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += value_bytes
    for number, weights in enumerate(shards, 1):
        alone = len(shards) == 1
        file = "model.safetensors" if alone else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = packed(weights, layout)
        write_tensors(directory / file, tensors, tensors.items(), layout.metadata(weights))
    write_index(directory)


def write_index(directory: Path) -> None:
    """Writes the index of the tensors in `directory`, if it has several files."""
    checkpoint = Checkpoint.open(directory)
    if len(checkpoint.files) > 1:
        weight_map = {name: entry.file.name for name, entry in checkpoint.entries.items()}
        about = {"metadata": {"total_size": checkpoint.num_bytes}, "weight_map": weight_map}
        write_json(directory / INDEX, about)


def packed(weights: Mapping[str, Tensor], layout: FileLayout) -> dict[str, Tensor]:
    """Returns the tensors of a file for `weights`."""
    return {key: part for name, weight in weights.items() for key, part in layout.pack(name, weight).items()}


def _write_configs(directory: Path, model: Any, state: Mapping[str, Tensor], layout: FileLayout) -> None:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return
    raw: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    raw["architectures"] = [type(model).__name__]
    if isinstance(dtype := getattr(model, "dtype", None), torch.dtype):  # `to` does not change the config's
        raw["dtype"] = str(dtype).removeprefix("torch.")
    raw.pop("quantization_config", None)
    if raw.get("tie_word_embeddings", True) and hasattr(model, "get_output_embeddings"):
        head = getattr(model.get_output_embeddings(), "weight", None)
        if isinstance(head, MXTensor) and head is not model.get_input_embeddings().weight:
            raw["tie_word_embeddings"] = False  # the head's copy is stored quantized, the embedding's is not
    if layout.config is not None:
        linears = ((name, linear) for name, linear in model.named_modules() if isinstance(linear, nn.Linear))
        modules = {user_path(name): linear.weight for name, linear in linears}
        raw["quantization_config"] = quantization_config(layout.config, state, modules)
    write_json(directory / "config.json", raw)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        write_json(directory / "generation_config.json", json.loads(generation.to_json_string()))


def quantization_config(
    config: Config, state: Mapping[str, Tensor], modules: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Returns the quantization_config of a checkpoint.

    Readers look modules up by name. The config contains the names in the model and in the file, which differ
    for renamed modules and for modules that share a weight.

    config: function of the layout. state: weights of the checkpoint by their names in it. modules: weights of
    the model's linear layers, by layer path.
    """
    weights = {name.removesuffix(".weight"): value for name, value in {**state, **modules}.items()}
    matrices = [name for name, value in state.items() if name.endswith(".weight") and value.ndim == 2]
    names = [*(name.removesuffix(".weight") for name in matrices), *modules]
    return config(
        [name for name in names if not isinstance(weights[name], MXTensor)],
        {name: value.form for name, value in weights.items() if isinstance(value, MXTensor)},
    )
