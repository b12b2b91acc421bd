"""Inputs for models whose class says what they take: Hugging Face's and timm's. Values do not matter."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from mxcompile.errors import ModelError
from mxcompile.plan.dummy_inputs import dummy_inputs


def example_inputs(model: nn.Module) -> dict[str, Any]:
    """Keyword arguments on the meta device that `model`, of Hugging Face or timm, can be traced with.

    Without labels and caches. Raises `ModelError` for any other model.
    """
    with torch.device("meta"):
        config = getattr(model, "config", None)
        if hasattr(config, "model_type"):
            return _without_labels(model, dummy_inputs(model, config, 1, None))
        size = (getattr(model, "pretrained_cfg", None) or {}).get("input_size")
        if size is not None:
            dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
            return {"x": torch.randn(1, *size, dtype=dtype)}
    raise ModelError(
        f"cannot trace {type(model).__name__} without inputs: pass args=(…) or kwargs={{…}}; values do not"
        " matter"
    )


def _without_labels(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(model.forward).parameters
    labels = inputs.pop("labels", None)
    if labels is not None and "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = labels
    return inputs | ({"use_cache": False} if "use_cache" in parameters else {})
