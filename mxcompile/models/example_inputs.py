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
            inputs = dummy_inputs(model, config, 1, None)
            parameters = _parameters(model)
            labels = inputs.pop("labels", None)
            if labels is not None and "decoder_input_ids" in parameters:
                inputs["decoder_input_ids"] = labels
            return inputs | ({"use_cache": False} if "use_cache" in parameters else {})
        size = (getattr(model, "pretrained_cfg", None) or {}).get("input_size")
        if size is not None:
            return {"x": torch.randn(1, *size, dtype=_floats(model))}
    raise ModelError(
        f"cannot trace {type(model).__name__} without inputs: pass args=(…) or kwargs={{…}}, which a factory"
        " returns; values do not matter"
    )


def dummy_inputs(model: nn.Module, config: Any, batch: int, length: int | None) -> dict[str, Any]:
    """Returns random keyword arguments for a Hugging Face `model` with `config`.

    length: sequence length. Default: 512, or the model's maximum if that is smaller. Raises `ModelError` if
    `length` exceeds the maximum, or if the model's input is not tokens, pixels or mel features.
    """
    owner, main = type(model).__name__, getattr(model, "main_input_name", "input_ids")
    if main not in _INPUTS:
        raise ModelError(
            f"{owner} takes {main!r}, which cannot be made from a config.json: name a factory,"
            " package.module:factory, that returns (model, args, kwargs)"
        )
    try:
        return _INPUTS[main](model, config, batch, length)
    except AttributeError as error:
        raise ModelError(f"{owner}: cannot make inputs from its configuration: {error}") from None
    except (TypeError, RuntimeError) as error:  # PyTorch's, for sizes beyond 64 bits
        first_line = str(error).partition("\n")[0]
        raise ModelError(f"{owner}: cannot make inputs of this size: {first_line}") from None


def _image(model: nn.Module, config: Any, batch: int, _: int | None) -> dict[str, Any]:
    inputs: dict[str, Any] = {"pixel_values": _pixels(model, config, batch)}
    if "labels" in _parameters(model) and hasattr(config, "num_labels"):
        inputs["labels"] = torch.randint(config.num_labels, (batch,))
    return inputs


def _pixels(model: nn.Module, config: Any, batch: int) -> Tensor:
    size = config.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return torch.randn(batch, getattr(config, "num_channels", 3), height, width, dtype=_floats(model))


def _speech(model: nn.Module, config: Any, batch: int, length: int | None) -> dict[str, Any]:
    shape = batch, config.num_mel_bins, 2 * config.max_source_positions
    tokens = batch, min(length or _LENGTH, config.max_target_positions)
    target = "labels" if "labels" in _parameters(model) else "decoder_input_ids"
    return {
        "input_features": torch.randn(shape, dtype=_floats(model)),
        target: torch.randint(config.get_text_config().vocab_size, tokens),
    }


def _text(model: nn.Module, config: Any, batch: int, length: int | None) -> dict[str, Any]:
    text, parameters = config.get_text_config(), _parameters(model)
    positions = getattr(text, "max_position_embeddings", None) or length or _LENGTH
    if length is not None and length > positions:
        raise ModelError(
            f"{type(model).__name__} has {positions} positions: `length` must be at most that, found {length}"
        )
    shape = (batch, length or min(_LENGTH, positions))
    inputs: dict[str, Any] = {"input_ids": torch.randint(text.vocab_size, shape)}
    target = next((name for name in ("labels", "decoder_input_ids") if name in parameters), None)
    if target is not None:
        inputs[target] = torch.randint(text.vocab_size, shape)
    generates = getattr(model, "can_generate", lambda: False)()  # images are optional for a language model
    if "pixel_values" in parameters and hasattr(config, "vision_config") and not generates:
        inputs["pixel_values"] = _pixels(model, config.vision_config, batch)  # a pair of encoders, like CLIP
    return inputs


_INPUTS = {"pixel_values": _image, "input_features": _speech, "input_ids": _text}
"""Functions that make the inputs of a model, by the name of its main input."""


def _parameters(model: nn.Module) -> frozenset[str]:
    return frozenset(inspect.signature(model.forward).parameters)


def _floats(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
