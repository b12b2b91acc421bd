"""`export_weights`: the current weights of a model in training, as the qdata that its forward multiplies.

    weight of a layer in MXFP8, MXFP4, NVFP4  →  qdata and scales of the forward's cast
    any other tensor of the state         →  its values, without scales

A server that multiplies this qdata computes the same as training, so that in reinforcement learning samples
come from the trained model itself.
Tensors are created lazily, one at a time. Under FSDP2 and tensor parallelism, every rank casts its shard and
qdata is gathered; with whole blocks per shard, this equals the cast of the gathered weight bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mxcompile.checkpoint.layouts import COMPRESSED_TENSORS, FileLayout, layout_of
from mxcompile.checkpoint.save import published, state_of
from mxcompile.compiler.parameter_uses import uses
from mxcompile.compiler.session.session import compiled_policy, session_of
from mxcompile.distributed.tensors import MasterWeight, TileCast, local
from mxcompile.errors import ModelError
from mxcompile.formats import BLOCK, Tile, is_quantized, stored_labels
from mxcompile.formats.encoding import encode_tensors, pack, tensor_amax
from mxcompile.formats.two_level import gain
from mxcompile.models.arguments import check_module
from mxcompile.models.fsdp import groups
from mxcompile.models.wrappers import FSDP1, user_model
from mxcompile.passes.weights import WeightUse, common_cast, weight_uses
from mxcompile.policy import Policy
from mxcompile.serving.plan import UNSEEN, weight_of
from mxcompile.storage import MXTensor
from mxcompile.storage.cast import cast
from mxcompile.storage.weights import StoredWeights


class ExportedTensor(NamedTuple):
    """One tensor of a model's state.

    Attributes:
        name: Name of a tensor in the published checkpoint of the model.
        codes: FP8 elements, bytes of two FP4 elements each, or the values of a tensor that is not quantized.
        scales: Scales of blocks of 32 along the last dimension, [..., k/32]; for NVFP4, E4M3 scales of blocks
            of 16. None for a tensor that is not quantized.
        global_scale: FP32 [1]; divides the scales of NVFP4.
    """

    name: str
    codes: Tensor
    scales: Tensor | None = None
    global_scale: Tensor | None = None


def export_weights(
    model: nn.Module,
    layout: str = COMPRESSED_TENSORS,
    *,
    policy: Policy | str | dict[str, Any] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> ExportedWeights:
    """Returns an iterable over the current weights of `model`; each iteration reads them anew.

    On several ranks, every rank must iterate, because sharded weights are gathered; each rank gets whole
    weights. A weight that the layout does not support, or whose shards cut blocks, is exported without scales
    in its own dtype; `ExportedWeights.weights` has the reason.

    Args:
        model: The compiled model: bare, or in ``DistributedDataParallel``, ``fully_shard`` or
            ``parallelize_module``.
        layout: ``compressed-tensors`` (scales are uint8) or ``torchao`` (scales are E8M0).
        policy: The policy with which the model is compiled; by default the policy of the compiled model.
        args: Positional arguments of a call of the model, on any device. A trace of this call on fake tensors
            yields the casts. A Hugging Face or timm model needs none.
        kwargs: Keyword arguments of the call.

    Returns:
        The iterable of `ExportedTensor`.

    Raises:
        ModelError: The model was not compiled in this process or was compiled with several policies (pass
            `policy`), cannot be traced, or has no layer in a format of stored weights.
        CheckpointError: The layout is unknown.

    Examples:
        >>> for name, codes, scales, global_scale in mxcompile.export_weights(model):
        ...     send(name, codes, scales)
    """
    check_module("export_weights", model)
    form, model = layout_of(layout), user_model(model)
    if any(FSDP1 in module._modules for module in model.modules()):
        raise ModelError("export_weights reads FSDP2's shards; FSDP1 has none of whole rows: use fully_shard")
    resolved = compiled_policy(model) if policy is None else Policy.resolve(policy)
    uses_by_path = uses(model, resolved, args, kwargs, weight_uses, training=False).by_path
    exported = ExportedWeights(model, form, {path: common_cast(use) for path, use in uses_by_path.items()})
    plan, rows = session_of(model).plan, exported.weights.weights
    unseen = {row.name.removesuffix(".weight") for row in rows if row.reason == UNSEEN.reason}
    records = plan.records(resolved) if plan else ()
    if lost := sorted(unseen & {record.name for record in records if is_quantized(record.precision)}):
        raise ModelError(
            f"{lost[0]} runs in a quantized format, but a trace of the model does not reach it: call"
            " export_weights with policy=… before the model is first called"
        )
    if not any(weight.stored for weight in exported.weights.weights):
        raise ModelError(f"no weight would be exported in {stored_labels()}\n{exported.weights}")
    return exported


class ExportedWeights:
    """The weights of a model. Iteration yields an `ExportedTensor` for each, with its current value.

    Attributes:
        weights: The decision for each weight of a linear layer or embedding, with the reason; print it.
    """

    def __init__(self, model: nn.Module, layout: FileLayout, own_uses: Mapping[str, WeightUse]) -> None:
        self._model, self._layout = model, layout
        sharded = (parameter for _, parameters in groups(model) for parameter in parameters)
        self._dtypes = {path: parameter.mp_policy.param_dtype for path, parameter in sharded}
        self._casts: dict[str, WeightUse] = {}
        rows = []
        for name, value in state_of(model).items():
            if name not in own_uses and value.ndim < 2:
                continue
            use = own_uses.get(name, UNSEEN)
            weight = weight_of(name, value, use)
            if weight.form is not None:
                if reason := layout.obstacle(weight) or _cut(value, use):
                    weight = replace(weight, form=None, reason=reason)
                else:
                    self._casts[name] = use
            rows.append(weight)
        self.weights = StoredWeights(weights=tuple(rows))

    def __iter__(self) -> Iterator[ExportedTensor]:
        """Yields every tensor of the state once, in the order of ``state_dict``."""
        for name, value in state_of(self._model).items():
            how, dtype = self._casts.get(name), self._dtypes.get(name)
            value = value.detach()
            if dtype is not None and value.is_floating_point():
                value = value.to(dtype)  # the dtype in which FSDP2 gathers it
            exported = _whole(value) if how is None else _cast(name, value, how)
            for key, tensor in published(self._model, {name: exported}).items():
                yield ExportedTensor(key, *self._layout.pack(key, tensor).values())

    def quantization_config(self) -> dict[str, Any]:
        """Returns the entry ``quantization_config`` of a config.json for the exported weights.

        Returns:
            The entry as JSON data.

        Raises:
            ModelError: The layout has no such entry, e.g. torchao's.
        """
        if self._layout.config is None:
            raise ModelError(f"{self._layout.name} has the formats in its files, not in a config.json")
        rows = [(row.name.removesuffix(".weight"), row.form) for row in self.weights.weights]
        stored = {name: form.stored for name, form in rows if form is not None}
        return self._layout.config((name for name, form in rows if form is None), stored)


def _cut(value: Any, how: WeightUse) -> str:
    """Returns why shards of `value` cannot be cast separately, "" if they can or need not."""
    if how.form is not None and how.form.two_level:
        return ""
    parts = [1] * value.ndim
    mesh = () if local(value) is value else value.device_mesh.shape
    for placement, ranks in zip(getattr(value, "placements", ()), mesh, strict=True):
        if hasattr(placement, "dim"):  # a shard, strided or not
            parts[placement.dim % value.ndim] *= ranks
    for dim in range(value.ndim - (2 if how.square else 1), value.ndim):
        if parts[dim] > 1 and value.shape[dim] % (parts[dim] * BLOCK):
            return f"{parts[dim]} shards of its dimension {dim} ({value.shape[dim]}) cut blocks of {BLOCK}"
    return ""


def _cast(name: str, value: Tensor, how: WeightUse) -> MXTensor:
    """Returns the whole tensor `value`, quantized. Each rank casts its shard, unless scales are two-level.

    The scale of a square tile is repeated for each of its rows.
    """
    form = how.form
    assert form is not None
    if form.two_level:
        value = _whole(value)
        if not how.square:
            return cast(value, -1, form)
        amax = tensor_amax(value)
        square = replace(form, tile=Tile(form.tile.along, form.tile.along))
        codes, scale = encode_tensors(value, -1, square, amax=amax)
        rows = scale.repeat_interleave(form.tile.along, -2)[..., : value.shape[-2], :].contiguous()
        elements = pack(codes, -1, form.elem).view(form.stored_dtype)
        return MXTensor(elements, rows, -1, value.dtype, gain(amax, form))
    shard = local(value)
    shard = shard.master if isinstance(shard, MasterWeight) else shard
    if how.square:
        codes, tiles = TileCast(name=name, elem_dtype=form.stored_dtype, rounding=form.derivation)(shard)
        scales = tiles.repeat_interleave(BLOCK, -2)[..., : shard.shape[-2], :]
    else:
        quantized = cast(shard, -1, form)
        codes, scales = quantized.qdata, quantized.scale_bytes
    codes = _gathered(value, codes.view(torch.uint8), value.shape[-1] // form.elem.per_byte)
    scales = _gathered(value, scales, value.shape[-1] // BLOCK)
    return MXTensor(codes.view(form.stored_dtype), scales.view(torch.float8_e8m0fnu), -1, value.dtype)


def _gathered(like: Any, part: Tensor, width: int) -> Tensor:
    """Returns the whole tensor, with rows of `width`, from this rank's shard `part`, sharded as `like`."""
    if local(like) is like:
        return part
    from torch.distributed.tensor import DTensor

    shape = torch.Size((*like.shape[:-1], width))
    stride = torch.empty(shape, device="meta").stride()
    sharded = DTensor.from_local(
        part.contiguous(), like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )
    whole: Tensor = sharded.full_tensor()
    return whole


def _whole(value: Any) -> Tensor:
    """Returns the whole tensor of a DTensor, or `value` itself."""
    if local(value) is value:
        return value
    whole: Tensor = value.full_tensor()
    return whole.master if isinstance(whole, MasterWeight) else whole
