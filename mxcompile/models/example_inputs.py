"""Random inputs for models whose configuration describes them: Hugging Face and timm models.

Inputs of a Hugging Face model are arguments of its forward, labels included. Sequences have at
most as many tokens as the model has positions.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from mxcompile.errors import ModelError

_LENGTH = 512


def example_inputs(model: nn.Module) -> dict[str, Any]:
    """Returns keyword arguments on the meta device for a trace of a Hugging Face or timm `model`.

    Labels and caches are left out. Raises `ModelError` for any other model.
    """
    with torch.device("meta"):
        config = getattr(model, "config", None)
        if hasattr(config, "model_type"):
            return _without_labels(model, dummy_inputs(model, config, 1, None))
        size = (getattr(model, "pretrained_cfg", None) or {}).get("input_size")
        if size is not None:
            return {"x": torch.randn(1, *size, dtype=_floats(model))}
    raise ModelError(
        f"cannot trace {type(model).__name__} without inputs: pass args=(…) or kwargs={{…}}, which a factory"
        " returns; values do not matter"
    )


def _without_labels(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(model.forward).parameters
    labels = inputs.pop("labels", None)
    if labels is not None and "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = labels
    return inputs | ({"use_cache": False} if "use_cache" in parameters else {})


def dummy_inputs(model: nn.Module, config: Any, batch: int, length: int | None) -> dict[str, Any]:
    """Returns random keyword arguments for a Hugging Face `model` with `config`.

    length: sequence length. Default: 512, or the model's maximum if that is smaller. Raises `ModelError` if
    `length` exceeds the maximum, or if the model's input is not tokens, pixels or mel features.
    """
    parameters = frozenset(inspect.signature(model.forward).parameters)
    owner, main = type(model).__name__, getattr(model, "main_input_name", "input_ids")
    try:
        match main:
            case "pixel_values":
                return _image(model, config, parameters, batch)
            case "input_features":
                return _speech(model, config, parameters, batch, length)
            case "input_ids":
                return _text(model, config, parameters, batch, length)
    except AttributeError as error:
        raise ModelError(f"{owner}: cannot make inputs from its configuration: {error}") from None
    except (TypeError, RuntimeError) as error:  # PyTorch's, for sizes beyond 64 bits
        first_line = str(error).partition("\n")[0]
        raise ModelError(f"{owner}: cannot make inputs of this size: {first_line}") from None
    raise ModelError(
        f"{owner} takes {main!r}, which cannot be made from a config.json: name a factory,"
        " package.module:factory, that returns (model, args, kwargs)"
    )


def _image(model: nn.Module, config: Any, parameters: frozenset[str], batch: int) -> dict[str, Any]:
    inputs: dict[str, Any] = {"pixel_values": _pixels(model, config, batch)}
    if "labels" in parameters and hasattr(config, "num_labels"):
        inputs["labels"] = torch.randint(config.num_labels, (batch,))
    return inputs


def _pixels(model: nn.Module, config: Any, batch: int) -> Tensor:
    size = config.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = getattr(config, "num_channels", 3)
    return torch.randn(batch, channels, height, width, dtype=_floats(model))


def _speech(
    model: nn.Module, config: Any, parameters: frozenset[str], batch: int, length: int | None
) -> dict[str, Any]:
    frames = 2 * config.max_source_positions
    target = "labels" if "labels" in parameters else "decoder_input_ids"
    shape = (batch, config.num_mel_bins, frames)
    tokens = min(length or _LENGTH, config.max_target_positions)
    return {
        "input_features": torch.randn(shape, dtype=_floats(model)),
        target: torch.randint(config.get_text_config().vocab_size, (batch, tokens)),
    }


def _text(
    model: nn.Module, config: Any, parameters: frozenset[str], batch: int, length: int | None
) -> dict[str, Any]:
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or length or _LENGTH
    if length is not None and length > positions:
        raise ModelError(
            f"{type(model).__name__} has {positions} positions: `length` must be at most that, found {length}"
        )
    shape = (batch, length or min(_LENGTH, positions))
    inputs: dict[str, Any] = {"input_ids": torch.randint(text.vocab_size, shape)}
    if "labels" in parameters:
        inputs["labels"] = torch.randint(text.vocab_size, shape)
    elif "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = torch.randint(text.vocab_size, shape)
    generates = getattr(model, "can_generate", lambda: False)()  # images are optional for a language model
    if "pixel_values" in parameters and hasattr(config, "vision_config") and not generates:
        inputs["pixel_values"] = _pixels(model, config.vision_config, batch)  # a pair of encoders, like CLIP
    return inputs


def _floats(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
