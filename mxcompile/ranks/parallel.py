"""Named methods to parallelise a plain model on a mesh, with torchtitan's defaults.

    fsdp        fully_shard of every repeated block, then of the model, on the axis dp or dp_shard. An axis
                dp_replicate replicates weights (HSDP). Weights are gathered in BF16, gradients reduced in
                FP32. With an axis pp weights are gathered once for all micro-batches. With `ep` the axis ep
                shards everything but experts as well.
    ep          experts of transformers' models spread over the axis ep (see `experts`)
    tp=llama    on the axis tp: q, k, v, gate and up columnwise, o and down rowwise, the embedding and the
                head by vocabulary; activations between the layers are replicated

`tp=llama` matches the layer names of Llama in transformers and in torchtitan. A factory with the user's own
code covers every other model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mxcompile.errors import OptionError, check_word
from mxcompile.models.blocks import Blocks
from mxcompile.models.fake_copy import fake_copy, rewrapped
from mxcompile.models.names import owners
from mxcompile.models.value_tracking_mode import ValueTrackingMode
from mxcompile.ranks.experts import EXPERTS, experts_of, is_spread, spread_
from mxcompile.ranks.shape import pipeline_ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_COLUMNS = re.compile(r".*\.(q_proj|k_proj|v_proj|gate_proj|up_proj|wq|wk|wv|w1|w3)")
_ROWS = re.compile(r".*\.(o_proj|down_proj|wo|w2)")
_EMBEDDING = re.compile(r"(.*\.)?(embed_tokens|tok_embeddings)")
_HEAD = re.compile(r"(.*\.)?(lm_head|output)")


def parallelised(model: nn.Module, words: str, mesh: DeviceMesh) -> nn.Module:
    """Returns a copy of `model` on the meta device, parallelised on `mesh`.

    words: names from `WAYS`, separated by commas. Raises `OptionError` for an unknown name, for a mesh
    without the required axis, and for a model that a method does not support.
    """
    requested = [word.strip() for word in words.split(",")]
    for word in requested:
        check_word("way to parallelise", word, WAYS)
    copied = fake_copy(model, ValueTrackingMode(), fake=_on_meta)
    if {EXPERTS, "tp=llama"} <= {*requested}:
        raise OptionError(
            "ep and tp=llama cannot be combined: parallelise the model in a factory that takes the mesh"
        )
    for word, way in WAYS.items():
        if word in requested:
            way(copied, mesh)
    return rewrapped(copied, model)


def _on_meta(tensor: Tensor) -> Tensor:
    """Returns a parameter on the meta device; a buffer unchanged, because the model may read its values."""
    if not isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=tensor.requires_grad)


def _axes(mesh: DeviceMesh, word: str, *allowed: tuple[str, ...]) -> Any:
    """Returns the submesh of the first entry of `allowed` that `mesh` contains. Raises `OptionError`."""
    names = mesh.mesh_dim_names or ()
    for axes in allowed:
        if set(axes) <= set(names):
            return mesh[axes]
    wanted = " or ".join(",".join(axes) for axes in allowed)
    raise OptionError(f"{word} needs a mesh with the axis {wanted}, found {', '.join(names)}")


def _spread_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    along = _axes(mesh, EXPERTS, (EXPERTS,))
    layers = list(experts_of(model))
    if not layers:
        raise OptionError(
            f"ep finds no experts as in transformers' models in {type(model).__name__}: parallelise the"
            " model in a factory that takes the mesh"
        )
    for path, module in layers:
        spread_(module, along, path)


def _shard_fully(model: nn.Module, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard

    along = _axes(mesh, "fsdp", ("dp_replicate", "dp_shard"), ("dp_shard",), ("dp",))
    settings: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        # under a pipeline schedule every micro-batch would gather the weights again
        "reshard_after_forward": None if pipeline_ranks(mesh) == 1 else False,
    }
    spread = [module for module in model.modules() if is_spread(module)]
    ranks = along.size(-1)
    for module in spread:
        fully_shard(
            module,
            mesh=along,
            # FSDP2 shards dimension 0 by default, which would leave ranks without an expert
            shard_placement_fn=lambda p: (
                Shard(1) if p.ndim > 1 and p.shape[0] < ranks and not p.shape[1] % ranks else None
            ),
            **settings,
        )
    if spread:  # the axis ep shards parameters outside of experts, too
        *outer, last = along.mesh_dim_names
        both = mesh[last, EXPERTS]._flatten(f"{last}_{EXPERTS}")
        along = type(mesh)._concatenate([mesh[tuple(outer)], both]) if outer else both
    for path in Blocks.from_model(model).places:
        fully_shard(model.get_submodule(path), mesh=along, **settings)
    fully_shard(model, mesh=along, **settings)


def _split_llama(model: nn.Module, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    along = _axes(mesh, "tp=llama", ("tp",))
    styles: dict[str, Any] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and _EMBEDDING.fullmatch(path):
            styles[path] = RowwiseParallel(input_layouts=Replicate())
        elif isinstance(module, nn.Linear) and _HEAD.fullmatch(path):
            styles[path] = ColwiseParallel(output_layouts=Replicate())
        elif isinstance(module, nn.Linear) and _COLUMNS.fullmatch(path):
            styles[path] = ColwiseParallel()
        elif isinstance(module, nn.Linear) and _ROWS.fullmatch(path):
            styles[path] = RowwiseParallel()
    if not any(_COLUMNS.fullmatch(path) for path in styles):
        raise OptionError(
            f"tp=llama finds no layer of a Llama in {type(model).__name__}, such as layers.0.mlp.gate_proj or"
            " layers.0.feed_forward.w1: parallelise the model in a factory that takes the mesh"
        )
    ranks = along.size()
    for path in styles:  # an uneven split of a layer in a block would cut heads
        weight: Any = model.get_submodule(path).weight
        split = weight.shape[1 if _ROWS.fullmatch(path) else 0]
        inside = _COLUMNS.fullmatch(path) or _ROWS.fullmatch(path)
        if inside and split % ranks:
            raise OptionError(f"tp=llama cannot split {path}: {split} is not a multiple of {ranks} ranks")
    shared = owners(model).values()
    parallelize_module(model, along, styles)  # it separates shared parameters
    for (owner, name), *others in shared:
        for module, key in others:
            module._parameters[key] = owner._parameters[name]


WAYS: dict[str, Callable[[nn.Module, Any], None]] = {
    "tp=llama": _split_llama,
    EXPERTS: _spread_experts,
    "fsdp": _shard_fully,
}
"""Methods by name, in the order of their application."""
