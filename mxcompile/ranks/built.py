"""The model of one rank of a mesh, built by a factory on fake ranks or parallelised, and its fake copy.

FSDP2 works between compiled graphs. The copy therefore has whole weights in the gather dtype. Tensor
parallelism works inside the graphs: its hooks and its DTensors stay, and the graphs contain this rank's
shards and collectives. Checkpoint wrappers stay too, because recomputation takes time and the discarded
activations do not count as saved memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mxcompile.distributed.tensors import local
from mxcompile.errors import ModelError, MXCompileError, OptionError
from mxcompile.models.arguments import keywords
from mxcompile.models.fake_copy import fake_copy, rewrapped
from mxcompile.models.fakes import Faker
from mxcompile.models.names import user_path
from mxcompile.models.value_tracking_mode import ValueTrackingMode
from mxcompile.models.wrappers import is_distributed
from mxcompile.ranks.experts import EXPERTS
from mxcompile.ranks.fsdp import FSDPGroup, groups
from mxcompile.ranks.parallel import parallelised
from mxcompile.ranks.shape import MeshShape, fake_ranks
from mxcompile.versions import newer

Factory = Callable[..., Any]
"""Returns (model, args, kwargs). A factory with a required parameter gets the `DeviceMesh` there."""

_EXPERTS_NDIM = 3
"""Dimensions of a weight of grouped experts, [experts, n, k]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankModel:
    """The model of rank 0 of `mesh`, with the arguments of a call.

    groups: FSDP2 groups. is_split: whether FSDP2 or tensor parallelism shards parameters. plain: the model
    before `parallelised` copied it; `model` itself if a factory built it.
    """

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    groups: tuple[FSDPGroup, ...]
    mesh: Any
    is_split: bool
    plain: nn.Module

    def check(self, *, sends: bool) -> None:
        """Raises `ModelError` if the model is not parallelised. sends: whether its graphs communicate."""
        if not self.is_split and not sends:
            raise ModelError(
                f"{type(self.model).__name__} is not parallelised: name a way as `parallel`, such as fsdp, or"
                " call fully_shard or parallelize_module in a factory that takes the mesh"
            )

    @property
    def experts(self) -> dict[str, tuple[int, int]]:
        """Numbers of experts (on this rank, in total) of each parameter spread over ranks, by path."""
        gathered = {entry.path: entry.size for group in self.groups for entry in group.parameters}
        wholes = {user_path(path): parameter for path, parameter in self.plain.named_parameters()}
        numbers = {}
        for path, parameter in ((user_path(path), p) for path, p in self.model.named_parameters()):
            shard, whole = gathered.get(path, local(parameter).shape), wholes[path].shape
            if len(shard) == _EXPERTS_NDIM and shard[0] != whole[0]:
                numbers[path] = shard[0], whole[0]
        return numbers


def named_inputs(caller: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments for the call of a module; none for a factory on a mesh.

    arguments: ``locals()`` at the start of `caller`. Raises `OptionError` for arguments beside a factory,
    which returns the arguments of its model, and the errors of `keywords` for a module.
    """
    if arguments["mesh"] is None or isinstance(arguments["model"], nn.Module):
        return keywords(caller, arguments)
    if any(arguments[name] for name in ("args", "inputs", "kwargs")):
        raise OptionError(
            f"{caller}: a factory returns (model, args, kwargs): pass no other arguments with it"
        )
    return {}


@contextmanager
def rank_model(
    model: nn.Module | Factory,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    shape: MeshShape,
    parallel: str | None,
) -> Iterator[RankModel]:
    """Makes the process rank 0 of a fake mesh of `shape`, and yields the model of this rank.

    model: a factory, or a plain model to parallelise with the methods in `parallel`. Raises `OptionError` if
    the mesh cannot be created in this process.
    """
    # graphs with `ep` capture the split sizes of all-to-alls: ``tolist()`` would break them
    captured: Any = torch._dynamo.config.capture_scalar_outputs or EXPERTS in (parallel or "").split(",")
    patched: Any = torch._dynamo.config.patch(capture_scalar_outputs=captured)
    with fake_ranks(shape) as mesh, patched:
        from torch.distributed.tensor import DTensor

        if not isinstance(model, nn.Module):
            model, args, kwargs = _called(model, mesh)
        plain = model
        if parallel is not None:
            model = parallelised(model, parallel, mesh)
        shared = groups(model)
        is_split = bool(shared) or any(isinstance(parameter, DTensor) for parameter in model.parameters())
        yield RankModel(
            model=model, args=args, kwargs=kwargs, groups=shared, mesh=mesh, is_split=is_split, plain=plain
        )


def _called(factory: Factory, mesh: Any) -> tuple[nn.Module, Sequence[Any], Mapping[str, Any]]:
    """Returns the model and the arguments from `factory`, built on the meta device."""
    try:
        with torch.device("meta"):
            # a parameter without default takes the mesh
            parameters = inspect.signature(factory).parameters.values()
            takes_mesh = any(parameter.default is inspect.Parameter.empty for parameter in parameters)
            result = factory(mesh) if takes_mesh else factory()
    except MXCompileError:
        raise
    except Exception as error:  # the factory is user code and may raise anything
        name = getattr(factory, "__name__", str(factory))
        raise ModelError(f"factory {name} on fake ranks: {type(error).__name__}: {error}") from error
    match result:
        case (nn.Module() as model, tuple() | list() as args, dict() as kwargs):
            return model, args, kwargs
    raise ModelError(f"the factory returned {type(result).__name__}, not (model, args, kwargs)")


def rank_copy(groups: tuple[FSDPGroup, ...], model: nn.Module, mode: ValueTrackingMode) -> nn.Module:
    """Returns a copy of `model` as this rank runs it, with the weights of the FSDP2 `groups` gathered."""
    copied = fake_copy(
        model,
        mode,
        fake=_Shards(mode, groups),
        drops=lambda hook: is_distributed(hook) and not is_distributed(hook, ".tensor"),  # between graphs
    )
    return rewrapped(copied, model)


class _Shards(Faker):
    """Maps tensors to fakes with this rank's shapes: FSDP2 parameters gathered, DTensors as local shards."""

    def __init__(self, mode: ValueTrackingMode, groups: tuple[FSDPGroup, ...]) -> None:
        super().__init__(mode)
        self._assuming = mode
        self._gathered = {id(p.parameter): (p, group) for group in groups for p in group.parameters}

    def __call__(self, tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        if id(tensor) in self._gathered:
            gathered, group = self._gathered[id(tensor)]
            fake = self._shard(tensor, gathered.size, gathered.dtype, gathered.spec)
            if newer("torch", "2.14") and group.reduced is not None and fake.requires_grad:
                fake.grad_dtype = group.reduced  # torch 2.14 creates gradients in this dtype
            return fake
        if isinstance(tensor, DTensor):
            return self._shard(tensor, tensor.to_local().shape, tensor.dtype, tensor._spec)
        return super().__call__(tensor)

    def _shard(self, tensor: Tensor, size: torch.Size, dtype: torch.dtype, spec: Any) -> Tensor:
        """Returns a fake of `size`: the local tensor of a DTensor with layout `spec`, or plain without it."""
        from torch.distributed.tensor import DTensor

        with self._assuming.plain():
            with self._assuming:
                fake: Tensor = torch.empty(size, dtype=dtype, device="cpu")
            if spec is not None:
                fake = DTensor.from_local(
                    fake, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
                )
            is_parameter = isinstance(tensor, nn.Parameter)
            return nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
