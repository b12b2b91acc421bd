"""`load_quantized`: builds a model with stored weights from a checkpoint, without BF16 copies in between.

    config.json ─▶ model on the meta device;  qdata and scales ─▶ MXTensors ─▶ its parameters

Transformers' own conversions map names and shapes of a Hugging Face checkpoint to the model; they stack the
qdata of experts like any other tensors. Each tensor is read when its parameter is made.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from mxcompile.checkpoint.files import Checkpoint, line_of, read_json
from mxcompile.checkpoint.layouts import NO_LAYOUT, readers, weights_in
from mxcompile.errors import CheckpointError
from mxcompile.formats import stored_labels
from mxcompile.lowering.inductor import (
    decode as decode,  # registers Inductor's dequantize, also for AOTInductor packages
)
from mxcompile.models.named import configuration, model_class
from mxcompile.models.names import Owner, joined, user_path
from mxcompile.models.wrappers import user_model
from mxcompile.storage import MXTensor

log = logging.getLogger(__name__)

_VALUES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def load_quantized(
    path: str | Path, model: nn.Module | None = None, *, dtype: torch.dtype | None = None
) -> nn.Module:
    """Returns a model with the weights of a checkpoint; quantized weights become `MXTensor`s.

    Nothing is downloaded or unpickled, and no code from the directory is executed.

    Args:
        path: A safetensors file or a directory of them, in the layout of compressed-tensors, ModelOpt,
            AutoRound, SGLang (``mxfp8``), fine-grained FP8 (``fp8``), torchao, or GPT-OSS, whose experts
            stay in MXFP4. ``docs/serving.md`` lists the formats of each.
        model: The model to load into, on any device including meta; its parameters are replaced. By default,
            the result is the Hugging Face model of the directory's config.json, in evaluation mode.
        dtype: Dtype of the values of stored weights, if neither config.json nor the checkpoint contains it;
            by default the dtype of all other weights of the checkpoint, else BF16.

    Returns:
        The model.

    Raises:
        CheckpointError: The checkpoint is damaged, has no stored weight, or does not fit the model.

    Examples:
        >>> model = mxcompile.load_quantized("Llama-3-8B-MXFP8")
    """
    checkpoint = Checkpoint.open(path)
    if weights_in(checkpoint)[0] == NO_LAYOUT:
        raise CheckpointError(
            f"{path}: no weight is stored in FP8, {stored_labels()}: `mxcompile convert` stores them, and"
            " an ordinary checkpoint is read by from_pretrained or load_state_dict"
        )
    if model is not None:
        reading = readers(checkpoint, dtype or value_dtype(checkpoint, {}))
        _assign(checkpoint.path, user_model(model), reading)
        return model
    if not checkpoint.path.is_dir():
        raise CheckpointError(f"{path}: a single file does not name its model: pass model=")
    return _huggingface(checkpoint, dtype)


def value_dtype(checkpoint: Checkpoint, raw: Mapping[str, Any]) -> torch.dtype:
    """Returns the dtype of the values of stored weights, if the checkpoint does not contain it.

    It is the dtype in `raw`, its config.json, else the dtype of all floating-point weights that are not
    quantized; BF16 if there are several.
    """
    of_config = getattr(torch, str(raw.get("dtype") or raw.get("torch_dtype")), None)
    if isinstance(of_config, torch.dtype) and of_config.is_floating_point:
        return of_config
    plain = (weight for weight in weights_in(checkpoint)[1] if weight.is_read and not weight.stored)
    dtypes = {weight.dtype for weight in plain if weight.dtype in _VALUES}
    return dtypes.pop() if len(dtypes) == 1 else torch.bfloat16


def from_directory(directory: Path, dtype: torch.dtype) -> Any:
    """Returns the Hugging Face model of a directory with its weights, quantized or plain."""
    return _huggingface(Checkpoint.open(directory), dtype)


def _huggingface(checkpoint: Checkpoint, dtype: torch.dtype | None) -> nn.Module:
    """Returns the model of a directory's config.json with its weights. Raises `CheckpointError`.

    dtype: dtype of values, if the checkpoint does not contain it; None for `value_dtype`.
    """
    path = checkpoint.path
    raw = read_json(path / "config.json")
    dtype = dtype or value_dtype(checkpoint, raw)
    owner, config = architecture(path, raw)
    state = {name: _Unread(read) for name, read in readers(checkpoint, dtype).items()}
    try:
        model, info = owner.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
        )
    except CheckpointError:
        raise
    except Exception as error:  # transformers raises errors of many classes
        raise CheckpointError(f"{path}: {type(error).__name__}: {line_of(error)}") from error
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[key]:
            raise CheckpointError(f"{path}: {key.replace('_', ' ')}: {sorted(map(str, info[key]))[0]}")
    for parameter in model.parameters():
        if isinstance(parameter, MXTensor):
            parameter.requires_grad_(False)
    evaluated: nn.Module = model.eval()
    return evaluated


@dataclass(frozen=True, slots=True)
class _Unread:
    """A tensor that Transformers reads by ``[...]``, like a slice of a safetensors file."""

    read: Callable[[], Tensor]

    def __getitem__(self, _: Any) -> Tensor:
        return self.read()


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Copies the parameters and buffers of `checkpoint` into `model`, converted to the dtypes in `model`.

    Names may have the prefixes of wrappers. Raises `CheckpointError` if the checkpoint does not fit.
    """
    reading = {user_path(name): partial(checkpoint.read, name) for name in checkpoint.entries}
    _assign(checkpoint.path, model, reading, copies=True)


def _extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules that have an extra state, by its name in the state of `model`.

    A checkpoint need not have it, because only tensors can be in files.
    """
    return {
        user_path(joined(prefix, "_extra_state")): module
        for prefix, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _check_names(path: Path, names: Iterable[str], places: Mapping[str, Tensor]) -> None:
    """Raises `CheckpointError` unless `names`, of a checkpoint, cover exactly the tensors of the model."""
    loaded: set[int] = set()
    for name in names:
        if name not in places:
            raise CheckpointError(f"{path}: the checkpoint has {name!r}, which the model lacks")
        loaded.add(id(places[name]))
    for name, value in places.items():
        if id(value) not in loaded:
            raise CheckpointError(f"{path}: the checkpoint lacks {name!r}, which the model has")


def check_cover(path: Path, model: Any, names: Collection[str], split: Collection[str] = ()) -> None:
    """Raises `CheckpointError` if a checkpoint lacks a tensor of `model`; warns if it has others.

    Transformers' lists of tensors that may be missing or left over apply.

    Args:
        path: The checkpoint, for messages.
        model: The model.
        names: Names in the model of the tensors of the checkpoint.
        split: Transformers' patterns of names of tensors that loading splits from others.
    """
    extra = _extra_states(model)
    state = {user_path(name): value for name, value in model.state_dict(keep_vars=True).items()}
    places = {user_path(name) for name in names}
    loaded = {id(state[name]) for name in places & state.keys()}
    absent = {name for name, value in state.items() if id(value) not in loaded and name not in extra}
    patterns = [re.sub(r"\\\d", ".*", pattern) for pattern in split]
    absent = {name for name in absent if not any(re.search(pattern, name) for pattern in patterns)}
    info = SimpleNamespace(missing_keys=absent, unexpected_keys=places - state.keys())
    if hasattr(model, "_adjust_missing_and_unexpected_keys"):
        model._adjust_missing_and_unexpected_keys(info)
    if info.missing_keys:
        raise CheckpointError(
            f"{path}: the checkpoint lacks {min(info.missing_keys)!r}, which the model has"
            f" ({len(info.missing_keys)} in all)"
        )
    if info.unexpected_keys:
        log.warning(
            "%s: the model has no %r (%d in all): the result keeps such tensors, and load_quantized will"
            " refuse it",
            path,
            min(info.unexpected_keys),
            len(info.unexpected_keys),
        )


def architecture(path: Path, raw: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the class and the configuration of the Hugging Face model of `raw`, a config.json."""
    try:
        import transformers
    except ImportError:
        raise CheckpointError(
            f"{path}: a config.json needs transformers: pip install 'mxcompile[checkpoints]'"
        ) from None
    names = raw.get("architectures")
    if not names:
        raise CheckpointError(
            f"{path / 'config.json'}: 'architectures' is missing, which names the model; add it, such as"
            ' "architectures": ["LlamaForCausalLM"], or give the model itself'
        )
    owner = model_class(names)
    if owner is None:
        raise CheckpointError(
            f"{path}: transformers {transformers.__version__} has no model {', '.join(map(str, names))}, and"
            " code that comes with a checkpoint is never run; give the model itself"
        )
    plain = {key: value for key, value in raw.items() if key != "quantization_config"}
    try:
        return owner, configuration(plain)
    except Exception as error:  # transformers raises errors of many classes
        raise CheckpointError(f"{path}: {type(error).__name__}: {line_of(error)}") from error


def _assign(
    path: Path, model: nn.Module, reading: Mapping[str, Callable[[], Tensor]], *, copies: bool = False
) -> None:
    """Replaces each parameter and buffer of `model`, wherever it is shared, by its tensor in `reading`.

    copies: whether the values are copied into the model's own tensors instead.
    """
    places: defaultdict[int, list[Owner]] = defaultdict(list)
    tensors: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for owned in (module._parameters, module._buffers):
            for attribute, value in owned.items():
                if value is not None and attribute not in module._non_persistent_buffers_set:
                    tensors[user_path(joined(prefix, attribute))] = value
                    places[id(value)].append((module, attribute))
    extra = _extra_states(model)
    parameters = {name: read for name, read in reading.items() if name not in extra}
    _check_names(path, parameters, tensors)
    for name, read in tqdm(parameters.items(), desc="load", unit="tensor", disable=None, leave=False):
        value, old = read(), tensors[name]
        if value.shape != old.shape:
            shapes = f"shape {tuple(value.shape)}, the model's {tuple(old.shape)}"
            raise CheckpointError(f"{path}: {name!r} has {shapes}")
        if copies:
            old.detach().copy_(value)
            continue
        trained = old.requires_grad and not isinstance(value, MXTensor)
        new = nn.Parameter(value, requires_grad=trained) if isinstance(old, nn.Parameter) else value
        for module, attribute in places[id(old)]:
            setattr(module, attribute, new)  # a recurrent layer lists its weights in an attribute, too
    for name in reading.keys() & extra.keys():
        extra[name].set_extra_state(reading[name]())
