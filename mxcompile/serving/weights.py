"""`quantize_weights_`: a model's weights become MXFP8, MXFP4 or NVFP4 storage, in place.

    parameter w of a layer that the policy sends there in forward  →  MXTensor, quantize(w along K)

All other parameters stay as they are: embeddings, heads, norms, routers, biases, and weights that other
operators read too. A parameter that several modules share stays shared. Where a rule stores a head that
shares its weight with an embedding, the embedding keeps the weight as it was. One weight is cast at a time,
some rows at a time, so that nothing but its stored copy is needed beside the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from mxcompile.errors import ModelError
from mxcompile.formats import Format, num_blocks, stored_precision
from mxcompile.formats.encoding import encode_stored, gain, tensor_amax
from mxcompile.models.arguments import check_module
from mxcompile.models.example_inputs import example_inputs
from mxcompile.models.names import Owner, owners
from mxcompile.models.wrappers import users_own
from mxcompile.policy import Policy
from mxcompile.serving.choose import TABLE, StorageChoice, choose
from mxcompile.serving.table import StoredWeight, StoredWeights
from mxcompile.storage import MXTensor

_CHUNK = 1 << 19
"""Elements cast at once: a few temporaries of 2 MiB."""

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

    model: on any device; on the meta device too, where nothing but types changes. policy: a preset, file,
    dict or `Policy`; default the preset ``inference``. args, kwargs: what the model is called with: the roles
    of layers come from a trace of it on fake tensors; a Hugging Face or timm model needs none. progress: show
    a bar on a terminal.

    The model then computes with the values of its stored weights, in its own dtype, eagerly and under any
    backend. Stored weights are `MXTensor`s. They are not trained: they require no gradient. Weights of three
    dimensions, stacks of experts, are stored like others. Weights that are stored already stay as they are.

    Returns what became of every weight. Raises `ModelError` for a model that is sharded (DTensor), that
    cannot be traced, or that needs `args` or `kwargs`, and `PolicyError` for a policy that quantizes weights,
    but none to a format that they are stored in; nothing is changed then.
    """
    check_module("quantize_weights_", model)
    model = users_own(model)
    chosen = chosen_weights(model, policy, args, kwargs)
    places = owners(model)
    result: list[StoredWeight] = []
    wanted = [path for path in chosen if path in places]
    with tqdm(
        total=len(wanted), desc="weights", unit="layer", disable=None if progress else True, leave=False
    ) as bar:
        for path in wanted:
            result.append(_store(path, places[path], chosen[path]))
            bar.update()
    return StoredWeights(weights=tuple(result))


def chosen_weights(
    model: nn.Module,
    policy: Policy | str | dict[str, Any] | None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> dict[str, StorageChoice]:
    """Returns the decision of a policy for each weight of `model`, by path. Raises as `quantize_weights_`."""
    _refuse_sharded(model)
    if not args and not kwargs:
        kwargs = example_inputs(model)
    resolved = Policy.resolve("inference" if policy is None else policy)
    choices = choose(model, resolved, args, kwargs or {})
    unseen = StorageChoice(role="other", reason="no product of the traced call reads it as a matrix")
    rest = (path for path, value in model.named_parameters() if value.ndim > 1 and path not in choices)
    return {**choices, **dict.fromkeys(rest, unseen)}


def _refuse_sharded(model: nn.Module) -> None:
    for path, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh") and hasattr(parameter, "placements"):
            raise ModelError(
                f"{path} is sharded (a DTensor): store the weights before the model is sharded,"
                " or load a checkpoint that holds them stored"
            )


def _store(path: str, places: Sequence[Owner], chosen: StorageChoice) -> StoredWeight:
    """Store one parameter, if that is what was chosen; what became of it."""
    parameter = getattr(*places[0])
    before = parameter.numel() * parameter.element_size()
    reason = chosen.reason
    stored = None
    tables = [place for place in places if isinstance(place[0], nn.Embedding)] if chosen.apart else []
    places = [place for place in places if place not in tables]
    if isinstance(parameter, MXTensor):
        reason, stored = f"stored in {stored_precision(parameter.form)} already", parameter
    elif chosen.form is not None:
        obstacle = TABLE if chosen.apart and not (tables and places) else _obstacle(parameter, chosen)
        reason = obstacle or reason
        if not obstacle:
            stored = cast(parameter.detach(), chosen.block_dim, chosen.form)
            replacement = nn.Parameter(stored, requires_grad=False)
            for module, name in places:
                module._parameters[name] = replacement
    return StoredWeight(
        name=path,
        role=chosen.role,
        shape=tuple(parameter.shape),
        stored=stored is not None,
        reason=reason,
        num_bytes=before if stored is None else stored.stored_bytes + (before if tables else 0),
        bytes_bf16=2 * parameter.numel(),
        precision="" if stored is None else str(stored_precision(stored.form)),
    )


def _obstacle(parameter: Tensor, chosen: StorageChoice) -> str:
    """Returns why a parameter cannot be stored, "" if it can."""
    if type(parameter) not in (nn.Parameter, Tensor):
        return f"its type is {type(parameter).__name__}"
    if parameter.dtype not in _SOURCES:
        return f"its dtype is {str(parameter.dtype).removeprefix('torch.')}"
    assert chosen.form is not None
    return chosen.form.elem.unstorable(parameter.shape[chosen.block_dim])


def cast(x: Tensor, block_dim: int, form: Format) -> MXTensor:
    """`mxcompile.quantize` with temporaries of a few rows; `x` and the result are all that is large."""
    dim = block_dim % x.ndim
    result = empty(x.shape, dim, form, x.dtype, x.device)
    amax = _amax(x, dim) if form.two_level else None
    for rows in pieces(x, dim):
        encoded = encode_stored(x[rows], dim, form, amax)
        result.qdata[rows] = encoded.elements
        result.scale_bytes[rows] = encoded.scale_bytes
    if result.global_scale is not None and amax is not None:
        result.global_scale.copy_(gain(amax, form).reshape(result.global_scale.shape))
    return result


def _amax(x: Tensor, dim: int) -> Tensor:
    """The largest magnitude of `x`, FP32 [1]."""
    return torch.cat([tensor_amax(x[rows]) for rows in pieces(x, dim)] or [tensor_amax(x)]).amax().reshape(1)


def empty(
    shape: Sequence[int], dim: int, form: Format, dtype: torch.dtype, device: torch.device | str
) -> MXTensor:
    """A stored weight of `shape` whose values are not set, blocks along `dim`, standing for `dtype`."""
    whole = torch.empty([1] * len(shape), dtype=torch.float32, device=device) if form.two_level else None
    elements, blocks = list(shape), list(shape)
    elements[dim] //= form.elem.per_byte
    blocks[dim] = num_blocks(blocks[dim], form.tile.along)
    qdata = torch.empty(elements, dtype=form.stored_dtype, device=device)
    scale = torch.empty(blocks, dtype=form.scale.stored_dtype, device=device)
    return MXTensor(qdata, scale, dim % len(elements) - len(elements), dtype, whole)


def pieces(x: Tensor, dim: int) -> Iterator[tuple[slice, ...]]:
    """Parts of `x` of some `_CHUNK` elements, whole along `dim`."""
    other = max((d for d in range(x.ndim) if d != dim), key=lambda d: x.shape[d], default=None)
    if other is None:
        yield (slice(None),)
        return
    step = max(1, _CHUNK // max(1, x.numel() // max(1, x.shape[other])))
    for start in range(0, x.shape[other], step):
        yield (*[slice(None)] * other, slice(start, start + step))
