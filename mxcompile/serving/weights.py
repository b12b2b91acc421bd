"""`quantize_weights_`: stores a model's weights in MXFP8, MXINT8, MXFP4 or NVFP4, in place.

    parameter w of a layer that the policy quantizes in forward  →  MXTensor, quantize(w along K)

All other parameters stay: embeddings, heads, norms, routers, biases, and weights that other operators also
read. A parameter that several modules share stays shared: if a rule stores a head that shares its weight with
an embedding, the embedding reads rows of the stored tensor. Weights are cast one by one, in chunks of rows,
so the extra memory is one stored copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from mxcompile.formats import stored_precision
from mxcompile.models.arguments import check_module
from mxcompile.models.names import Owner, owners
from mxcompile.models.wrappers import user_model
from mxcompile.policy import Policy
from mxcompile.serving.plan import TABLE, planned_weights
from mxcompile.storage import MXTensor
from mxcompile.storage.cast import cast
from mxcompile.storage.weights import StoredWeight, StoredWeights

_SOURCES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def quantize_weights_(
    model: nn.Module,
    policy: Policy | str | dict[str, Any] | None = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> StoredWeights:
    """Stores the weights of `model` in the formats to which `policy` quantizes them in forward, in place.

    Weights are stored in MXFP8, MXINT8, MXFP4 or NVFP4.

    The model then computes with the stored values, in its own dtype, in eager mode and under any backend.
    Stored weights are `MXTensor`s that require no gradient. Three-dimensional weights (stacks of experts) are
    stored, too. Weights that are already stored stay as they are.

    Args:
        model: The model, on any device. On the meta device, only types change.
        policy: A preset, file, dict or `Policy`; by default the preset ``inference``.
        args: Positional arguments of a call of the model. A trace of this call on fake tensors yields the
            roles of the layers. A Hugging Face or timm model needs none.
        kwargs: Keyword arguments of the call.
        progress: Whether to show a progress bar on a terminal.

    Returns:
        The decision for every weight.

    Raises:
        ModelError: The model is sharded (DTensor), cannot be traced, or needs `args` or `kwargs`. Nothing
            changes.
        PolicyError: The policy quantizes weights, but none to a format in which they can be stored. Nothing
            changes.

    Examples:
        >>> print(mxcompile.quantize_weights_(model))
        >>> compiled = torch.compile(model, backend="mxfp8")
    """
    check_module("quantize_weights_", model)
    model = user_model(model)
    plan = planned_weights(model, policy, args, kwargs)
    places = owners(model)
    bar = tqdm(plan.values(), desc="weights", unit="layer", disable=None if progress else True, leave=False)
    return StoredWeights(weights=tuple(_store(weight, places.get(weight.name, ())) for weight in bar))


def _store(weight: StoredWeight, holders: Sequence[Owner]) -> StoredWeight:
    """Stores one parameter as planned, if possible. Returns the outcome."""
    if not holders:  # a buffer
        return weight
    parameter = getattr(*holders[0])
    if isinstance(parameter, MXTensor):
        return replace(
            weight,
            form=parameter.form,
            block_dim=parameter.block_dim,
            keeps_table=False,
            num_global_scales=1 if parameter.global_scale is None else parameter.global_scale.numel(),
            reason=f"stored in {stored_precision(parameter.form)} already",
        )
    if weight.form is None:
        return weight
    tables = [holder for holder in holders if weight.keeps_table and isinstance(holder[0], nn.Embedding)]
    layers = [holder for holder in holders if holder not in tables]
    if reason := TABLE if weight.keeps_table and not (tables and layers) else _obstacle(parameter, weight):
        return replace(weight, form=None, keeps_table=False, reason=reason)
    stored = nn.Parameter(cast(parameter.detach(), weight.block_dim, weight.form), requires_grad=False)
    for module, name in layers:
        module._parameters[name] = stored
    return weight


def _obstacle(parameter: Tensor, weight: StoredWeight) -> str:
    """Returns why a parameter cannot be stored as planned, "" if it can."""
    if type(parameter) not in (nn.Parameter, Tensor):
        return f"its type is {type(parameter).__name__}, not Parameter or Tensor"
    if parameter.dtype not in _SOURCES:
        return f"its dtype is {str(parameter.dtype).removeprefix('torch.')}, not a float of 16, 32 or 64 bits"
    assert weight.form is not None
    return weight.form.elem.unstorable(parameter.shape[weight.block_dim])
