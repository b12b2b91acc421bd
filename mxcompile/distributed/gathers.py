"""`quantize_gathers_` makes FSDP2 gather weights in MXFP8.

    weight whose GEMMs all read it in 32×32 tiles  →  MasterWeight

Each rank casts its own shard and sends qdata and scales, which the GEMMs of every rank read. Shards consist
of whole tiles, so a cast of the gathered weight would give the same bits. Shards, gradients, optimizer states
and checkpoints stay plain tensors in the master's precision. Other weights are gathered without a cast: they
have a reader that is not a GEMM, or shards that cut tiles.

State dicts contain plain tensors, on saving and on loading:

    state_dict()                     MasterWeight, or a DTensor of one  →  its values, in the same memory
    load_state_dict(assign=True)     values  →  MasterWeight with the cast of the present parameter

Checkpoints (``torch.save``, DCP, safetensors) therefore have the same tensors as without mxcompile.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mxcompile.compiler.parameter_uses import uses
from mxcompile.distributed.tensors import MasterWeight, TileCast, local, uneven, with_local
from mxcompile.errors import ModelError, OptionError
from mxcompile.formats import num_blocks
from mxcompile.models.names import Owner, owners
from mxcompile.models.wrappers import user_model
from mxcompile.passes.weights import WeightUse, tile_uses
from mxcompile.policy import Policy
from mxcompile.report.data.fold import spelled
from mxcompile.report.forms.tables import drawn, fitted
from mxcompile.report.forms.words import byte_count

_SOURCES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredWeight:
    """The gather format of one weight of a linear layer.

    Attributes:
        name: Path of the parameter.
        role: Role of the layer.
        shape: Shape of the weight before FSDP2 shards it. Under tensor parallelism, shape of the local shard.
        travels: Whether FSDP2 gathers the weight in MXFP8.
        reason: Reason for the format.
        num_bytes: Bytes of the gathered tensors.
        bytes_bf16: Bytes of the weight in BF16.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    travels: bool
    reason: str
    num_bytes: int
    bytes_bf16: int


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedGathers:
    """The gather format of every weight of a model's linear layers.

    ``print`` shows a table with equal weights folded into a row.

    Attributes:
        weights: One entry for each weight, in module order.
    """

    weights: tuple[GatheredWeight, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes gathered for the weights in MXFP8."""
        return sum(weight.num_bytes for weight in self.weights if weight.travels)

    @property
    def bytes_bf16(self) -> int:
        """Bytes of the same weights in BF16."""
        return sum(weight.bytes_bf16 for weight in self.weights if weight.travels)

    def __str__(self) -> str:
        travel = sum(weight.travels for weight in self.weights)
        share = f" ({self.num_bytes / self.bytes_bf16:.1%} of BF16)" if self.bytes_bf16 else ""
        head = (
            f"{travel} of {len(self.weights)} weights are gathered in MXFP8:"
            f" {byte_count(self.num_bytes)}{share}"
        )
        alike: dict[tuple[str, ...], list[str]] = {}
        for weight in self.weights:
            shape, precision = "×".join(map(str, weight.shape)), "mxfp8" if weight.travels else "unchanged"
            alike.setdefault((weight.role, shape, precision, weight.reason), []).append(weight.name)
        table = [["weight", "role", "shape", "gathered", "reason"]]
        table += ([spelled(names), *cells] for cells, names in alike.items())
        return f"{head}\n\n{drawn(fitted(table, ('weight', 'reason')))}" if self.weights else head


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
    if mesh is None and not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise OptionError(
            "quantize_gathers_ needs mesh=…, the mesh of fully_shard, or a default process group"
        )
    ranks = torch.distributed.get_world_size() if mesh is None else int(mesh.shape[-1])
    for path, module in model.named_modules():
        names = {kind.__name__ for kind in type(module).__mro__}
        if names & {"FSDPModule", "FullyShardedDataParallel"}:
            where = path or type(module).__name__
            raise ModelError(f"{where} is sharded already: call quantize_gathers_ before fully_shard")
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
        if not isinstance(cast, TileCast):
            continue
        parameter: nn.Parameter = getattr(*places[path][0])
        wrap = functools.partial(MasterWeight, cast=cast)
        master = nn.Parameter(with_local(parameter.detach(), wrap), parameter.requires_grad)
        vars(master).update(vars(parameter))
        for module, name in places[path]:
            module._parameters[name] = master
            register_state_hooks(module)
    return result


def _cast(path: str, owner: Owner, layers: Sequence[WeightUse], ranks: int) -> TileCast | str:
    """Returns the cast of the parameter at `path` before its gather, or the reason for none."""
    parameter: nn.Parameter = getattr(*owner)
    casts = set()
    for use in layers:
        if use.form is None:
            return use.reason
        casts.add(TileCast(name=path, elem_dtype=use.form.elem.dtype, rounding=str(use.form.rounding)))
    if len(casts) > 1:
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
    return casts.pop()


def _row(path: str, owner: Owner, layers: Sequence[WeightUse], cast: TileCast | str) -> GatheredWeight:
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


def register_state_hooks(module: nn.Module) -> None:
    """Registers the state dict hooks on `module`. A second call changes nothing."""
    if _after_saving not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_after_saving)
        module.register_load_state_dict_pre_hook(_before_loading)


def _after_saving(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    for name in module._parameters:
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):  # not for keep_vars=True
            state_dict[prefix + name] = with_local(
                value, lambda tensor: tensor.master if isinstance(tensor, MasterWeight) else tensor
            )


def _before_loading(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    if not local_metadata.get("assign_to_params_buffers", False):
        return
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        shard = None if parameter is None else local(parameter)
        if isinstance(shard, MasterWeight) and isinstance(value, Tensor):
            wrap = functools.partial(MasterWeight, cast=shard.cast)
            state_dict[prefix + name] = with_local(value.detach(), wrap)
