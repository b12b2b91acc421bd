"""`save_quantized`: a model with stored weights as a safetensors checkpoint that others read."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mxcompile.checkpoint.files import INDEX
from mxcompile.checkpoint.layouts import COMPRESSED_TENSORS, FileLayout, layout_of
from mxcompile.checkpoint.publish import sync_directory, write_json, write_tensors, writing
from mxcompile.errors import CheckpointError
from mxcompile.formats import Format
from mxcompile.models.wrappers import users_own
from mxcompile.storage import MXTensor


def save_quantized(
    model: nn.Module,
    directory: str | Path,
    *,
    layout: str = COMPRESSED_TENSORS,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write `model` to `directory`, which must not exist: weights, and a Hugging Face model's configs.

    layout: ``compressed-tensors`` (``mxfp8-quantized``, ``mxfp4-pack-quantized``, ``nvfp4-pack-quantized``;
    what Transformers and vLLM load) or ``torchao``, without NVFP4. The directory appears whole or not at all.
    Hugging Face models are written under the names of their published checkpoints. Raises `CheckpointError`
    for a model without a stored weight, if the directory exists or cannot be written, and if the layout
    cannot hold a weight.
    """
    form = layout_of(layout)
    model, target = users_own(model), Path(directory).absolute()
    if target.exists():
        raise CheckpointError(f"{target}: exists already")
    state = _state(model)
    if not any(isinstance(value, MXTensor) for value in state.values()):
        raise CheckpointError(
            "no weight of the model is stored in MXFP8, MXFP4 or NVFP4: quantize_weights_ stores them, and"
            " save_pretrained or safetensors writes an ordinary model"
        )
    with (
        writing(target),
        tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary,
    ):
        partial = Path(temporary) / target.name
        partial.mkdir()
        _write_shards(partial, state, form, max_shard_bytes)
        _write_configs(partial, model, state, form)
        partial.rename(target)
        sync_directory(target.parent)


def _state(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of `model` under their names in a checkpoint, every one once."""
    seen: set[int] = set()
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            state[name] = value.detach()
    if not hasattr(getattr(model, "config", None), "model_type"):
        return state
    from transformers.core_model_loading import revert_weight_conversion

    owner: Any = model
    reverted: dict[str, Tensor] = revert_weight_conversion(owner, state)
    return reverted


def _write_shards(directory: Path, state: Mapping[str, Tensor], layout: FileLayout, limit: int) -> None:
    shards = list(_shards(state, limit))
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, 1):
        alone = len(shards) == 1
        file = "model.safetensors" if alone else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors, about = described({name: state[name] for name in names}, layout)
        write_tensors(directory / file, tensors, tensors.items(), about)
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(each.nbytes for each in tensors.values())
    if len(shards) > 1:
        write_index(directory, weight_map, total)


def write_index(directory: Path, weight_map: Mapping[str, str], total: int) -> None:
    """Write which file has which tensor. total: bytes of all."""
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(weight_map)})


def described(state: Mapping[str, Tensor], layout: FileLayout) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the entries of a file for the tensors `state` of a model, and its metadata."""
    parts = {name: part for key, value in state.items() for name, part in packed(key, value, layout).items()}
    kinds = {
        name: (value.form, value.dtype) if isinstance(value, MXTensor) else None
        for name, value in state.items()
    }
    return parts, layout.metadata(kinds)


def packed(name: str, value: Tensor, layout: FileLayout) -> dict[str, Tensor]:
    """Returns the entries of a file for one tensor of a model."""
    return layout.pack(name, value) if isinstance(value, MXTensor) else {name: value.contiguous()}


def _shards(state: Mapping[str, Tensor], limit: int) -> Iterator[list[str]]:
    """The names of `state`, as many at once as fit in a file of `limit` bytes."""
    names: list[str] = []
    size = 0
    for name, value in state.items():
        own = value.stored_bytes if isinstance(value, MXTensor) else value.nbytes
        if names and size + own > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += own
    if names:
        yield names


def _write_configs(
    directory: Path, model: nn.Module, state: Mapping[str, Tensor], layout: FileLayout
) -> None:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return
    raw: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    raw["architectures"] = [type(model).__name__]
    raw.pop("quantization_config", None)
    if raw.get("tie_word_embeddings", True) and _are_apart(model):
        raw["tie_word_embeddings"] = False
    if layout.config is not None:
        whole = linears(model, lambda weight: not isinstance(weight, MXTensor))
        of_modules = {
            name: each.weight for name, each in model.named_modules() if isinstance(each, nn.Linear)
        }
        raw["quantization_config"] = layout.config(
            [*left_as_they_are(state), *whole], stored_modules({**state, **of_modules})
        )
    write_json(directory / "config.json", raw)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        write_json(directory / "generation_config.json", json.loads(generation.to_json_string()))


def _are_apart(model: Any) -> bool:
    """Whether a model that shared one weight between embedding and head now stores the head's quantized."""
    if not hasattr(model, "get_output_embeddings"):
        return False
    head = getattr(model.get_output_embeddings(), "weight", None)
    return isinstance(head, MXTensor) and head is not model.get_input_embeddings().weight


def linears(model: nn.Module, among: Callable[[Tensor], bool]) -> list[str]:
    """The linear layers of `model` whose weight is `among` those meant, by their names in the model.

    Readers ask for modules, which may be called otherwise than in a file, or have a weight that the file
    holds under another's name.
    """
    modules = model.named_modules()
    return [name for name, each in modules if isinstance(each, nn.Linear) and among(each.weight)]


def stored_modules(weights: Mapping[str, Tensor]) -> dict[str, Format]:
    """The formats of the stored ones of `weights`, by module; names may end in ``.weight``."""
    stored = {name: value for name, value in weights.items() if isinstance(value, MXTensor)}
    return {name.removesuffix(".weight"): value.form for name, value in stored.items()}


def left_as_they_are(state: Mapping[str, Any]) -> list[str]:
    """The modules whose ``weight`` of two dimensions is not stored: what readers must not take for such."""
    return [
        name.removesuffix(".weight")
        for name, value in state.items()
        if name.endswith(".weight") and len(value.shape) == 2 and not isinstance(value, MXTensor)
    ]
