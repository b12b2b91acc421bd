"""`quantize_gathers_` makes FSDP2 gather weights in MXFP8.

    weight whose GEMMs all read it in 32×32 tiles  →  MasterWeight

Each rank casts its own shard and sends qdata and scales, which the GEMMs of every rank read. Shards consist
of whole tiles, so a cast of the gathered weight would give the same bits. Shards, gradients, optimizer states
and checkpoints stay plain tensors in the master's precision. Other weights are gathered without a cast: they
have a reader that is not a GEMM, or shards that cut tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mxcompile.compiler.parameter_uses import uses
from mxcompile.distributed.states import register_state_hooks
from mxcompile.distributed.table import GatheredWeight, QuantizedGathers
from mxcompile.distributed.tensors import MasterWeight, TileCast, local, uneven, with_local
from mxcompile.errors import ModelError, OptionError
from mxcompile.formats import num_blocks
from mxcompile.models.names import Owner, owners
from mxcompile.models.wrappers import user_model
from mxcompile.passes.squares import TileUse, tile_uses
from mxcompile.policy import Policy

_SOURCES = (torch.float32, torch.bfloat16, torch.float16)


def quantize_gathers_(
    model: nn.Module,
    policy: Policy | str | dict[str, Any],
    *,
    mesh: Any = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> QuantizedGathers:
    """Makes FSDP2 gather weights of `model` in MXFP8, in place. Call it before ``fully_shard``.

    A weight is gathered in MXFP8 if the policy quantizes it with ``weight_block: 32x32`` in fprop and dgrad,
    nothing else reads it, and its shards consist of whole tiles (a multiple of 32 rows per rank). The weights
    become new `nn.Parameter` objects with the same values, so create the optimizer afterwards. With a
    ``param_dtype`` in ``MixedPrecisionPolicy`` weights are first cast to that dtype. A later compile raises
    `PolicyError` if its policy needs another format for a gathered weight.

    Args:
        model: The model, on any device.
        policy: The policy of the later compile: file, preset, dict or `Policy`.
        mesh: The `DeviceMesh` of ``fully_shard``. Default: all ranks of the default process group.
        args: Positional arguments of one call of the model, on any device. A trace on fake tensors finds the
            readers of each weight. A Hugging Face or timm model needs no arguments.
        kwargs: Keyword arguments of the call.

    Returns:
        The gather format of every weight of a linear layer, with the reason.

    Raises:
        ModelError: The model is sharded already, cannot be traced, or has no weight for which these
            conditions hold. The model is unchanged.
        OptionError: There is neither a mesh nor a process group.
        PolicyError: The policy is invalid.

    Examples:
        >>> print(quantize_gathers_(model, "policy.yaml", mesh=mesh, args=(tokens,)))
        >>> fully_shard(model, mesh=mesh)
    """
    model = user_model(model)
    ranks = _ranks(mesh)
    _refuse_sharded(model)
    layers = uses(model, Policy.resolve(policy), args, kwargs, tile_uses, training=True).by_path
    places = owners(model)
    casts = {
        path: _cast(path, places[path][0], layer, ranks) for path, layer in layers.items() if path in places
    }
    result = QuantizedGathers(
        weights=tuple(_row(path, places[path][0], layers[path], cast) for path, cast in casts.items())
    )
    if not any(weight.travels for weight in result.weights):
        raise ModelError(f"no weight would be gathered in MXFP8\n{result}")
    for path, cast in casts.items():
        if isinstance(cast, TileCast):
            _put(places[path], cast)
    return result


def _ranks(mesh: Any) -> int:
    """Returns the number of ranks that FSDP2 shards over."""
    if mesh is not None:
        return int(mesh.shape[-1])
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise OptionError(
            "quantize_gathers_ needs mesh=…, the mesh of fully_shard, or a default process group"
        )
    return torch.distributed.get_world_size()


def _refuse_sharded(model: nn.Module) -> None:
    for path, module in model.named_modules():
        names = {kind.__name__ for kind in type(module).__mro__}
        if names & {"FSDPModule", "FullyShardedDataParallel"}:
            where = path or type(module).__name__
            raise ModelError(f"{where} is sharded already: call quantize_gathers_ before fully_shard")


def _cast(path: str, owner: Owner, layers: Sequence[TileUse], ranks: int) -> TileCast | str:
    """Returns the cast of the parameter at `path` before its gather, or the reason for none."""
    parameter: nn.Parameter = getattr(*owner)
    for use in layers:
        if use.elem_dtype is None:
            return use.reason
    formats = {(use.elem_dtype, use.rounding) for use in layers}
    if len(formats) > 1:
        return "its GEMMs cast it in different ways"
    values = local(parameter)
    if type(values) not in (nn.Parameter, Tensor):
        return f"its type is {type(values).__name__}, not Parameter or Tensor"
    if values.dtype not in _SOURCES:
        return f"its dtype is {str(values.dtype).removeprefix('torch.')}, not a float of 16 or 32 bits"
    if values.ndim < 2 or not values.is_contiguous():
        return "it is not a matrix stored by rows"
    if reason := uneven(values.shape, ranks):
        return reason
    ((elem_dtype, rounding),) = formats
    assert elem_dtype is not None
    return TileCast(name=path, elem_dtype=elem_dtype, rounding=rounding)


def _row(path: str, owner: Owner, layers: Sequence[TileUse], cast: TileCast | str) -> GatheredWeight:
    shape = local(getattr(*owner)).shape
    bytes_bf16 = 2 * shape.numel()
    tiles = shape.numel() // max(1, shape[-2:].numel()) * num_blocks(shape[-2]) * num_blocks(shape[-1])
    travels = isinstance(cast, TileCast)
    return GatheredWeight(
        name=path,
        role=layers[0].role,
        shape=tuple(shape),
        travels=travels,
        reason=layers[0].reason if isinstance(cast, TileCast) else cast,
        num_bytes=shape.numel() + tiles if travels else bytes_bf16,
        bytes_bf16=bytes_bf16,
    )


def _put(places: Sequence[Owner], cast: TileCast) -> None:
    """Replaces the parameter at `places` by a `MasterWeight`."""
    parameter: nn.Parameter = getattr(*places[0])
    master = nn.Parameter(
        with_local(parameter.detach(), lambda values: MasterWeight(values, cast)), parameter.requires_grad
    )
    vars(master).update(vars(parameter))
    for module, name in places:
        module._parameters[name] = master
        register_state_hooks(module)
