"""`quantize_weights_`: a model's weights become MXFP8, MXFP4 or NVFP4 storage, in place.

    parameter w of a layer that the policy sends there in forward  →  MXTensor, quantize(w along K)

All other parameters stay as they are: embeddings, heads, norms, routers, biases, and weights that other
operators read too. A parameter that several modules share stays shared. Where a rule stores a head that
shares its weight with an embedding, the embedding keeps the weight as it was. One weight is cast at a time,
some rows at a time, so that nothing but its stored copy is needed beside the model.
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
from mxcompile.models.wrappers import users_own
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
    """Store the weights of `model` that `policy` sends to MXFP8, MXFP4 or NVFP4 in forward, in place.

    The model then computes with the values of its stored weights, in its own dtype, eagerly and under any
    backend. Stored weights are `MXTensor`s. They are not trained: they require no gradient. Weights of three
    dimensions, stacks of experts, are stored like others. Weights that are stored already stay as they are.

    Args:
        model: The model, on any device. On the meta device, nothing but types changes.
        policy: A preset, file, dict or `Policy`; by default the preset ``inference``.
        args: Positional arguments of a call of the model. The roles of layers come from a trace of this call
            on fake tensors. A Hugging Face or timm model needs none.
        kwargs: Keyword arguments of the call.
        progress: Whether to show a bar on a terminal.

    Returns:
        The outcome for every weight.

    Raises:
        ModelError: The model is sharded (DTensor), cannot be traced, or needs `args` or `kwargs`. Nothing is
            changed.
        PolicyError: The policy quantizes weights, but none to a format in which they can be stored. Nothing
            is changed.
    """
    check_module("quantize_weights_", model)
    model = users_own(model)
    plan = planned_weights(model, policy, args, kwargs)
    places = owners(model)
    weights = [weight for path, weight in plan.items() if path in places]
    bar = tqdm(weights, desc="weights", unit="layer", disable=None if progress else True, leave=False)
    return StoredWeights(weights=tuple(_store(weight, places[weight.name]) for weight in bar))


def _store(weight: StoredWeight, places: Sequence[Owner]) -> StoredWeight:
    """Stores one parameter as planned, if it can be. Returns the outcome."""
    parameter = getattr(*places[0])
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
    tables = [place for place in places if weight.keeps_table and isinstance(place[0], nn.Embedding)]
    layers = [place for place in places if place not in tables]
    if reason := TABLE if weight.keeps_table and not (tables and layers) else _obstacle(parameter, weight):
        return replace(weight, form=None, keeps_table=False, reason=reason)
    stored = nn.Parameter(cast(parameter.detach(), weight.block_dim, weight.form), requires_grad=False)
    for module, name in layers:
        module._parameters[name] = stored
    return weight


def _obstacle(parameter: Tensor, weight: StoredWeight) -> str:
    """Returns why a parameter cannot be stored as planned, "" if it can."""
    if type(parameter) not in (nn.Parameter, Tensor):
        return f"its type is {type(parameter).__name__}"
    if parameter.dtype not in _SOURCES:
        return f"its dtype is {str(parameter.dtype).removeprefix('torch.')}"
    assert weight.form is not None
    return weight.form.elem.unstorable(parameter.shape[weight.block_dim])
