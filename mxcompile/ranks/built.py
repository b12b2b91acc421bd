"""A model on one rank of a mesh: made by a factory on fake ranks, or parallelised there in ways by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mxcompile.distributed.tensors import local
from mxcompile.errors import ModelError, MXCompileError, OptionError
from mxcompile.models.arguments import check_module, keywords
from mxcompile.models.names import user_path
from mxcompile.ranks.experts import EXPERTS
from mxcompile.ranks.fsdp import FSDPGroup, groups
from mxcompile.ranks.parallel import parallelised
from mxcompile.ranks.shape import MeshShape, fake_ranks

Factory = Callable[..., Any]
"""Makes (model, args, kwargs), parallelised on the mesh that it is given if it takes one."""

_EXPERTS_NDIM = 3
"""Dimensions of the weights of experts, which are the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankModel:
    """A model on rank 0 of `mesh`, with its arguments.

    groups: of FSDP2. is_split: whether parameters are. plain: the model before it was parallelised, if that
    was done by name.
    """

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    groups: tuple[FSDPGroup, ...]
    mesh: Any
    is_split: bool
    plain: nn.Module

    def check(self, *, sends: bool) -> None:
        """Raises `ModelError` for a model that nobody parallelises. sends: whether its graphs do."""
        if not self.is_split and not sends:
            raise ModelError(
                f"{type(self.model).__name__} is not parallelised: name a way, such as --parallel fsdp, or"
                " call fully_shard or parallelize_module in a factory that takes the mesh"
            )

    @property
    def experts(self) -> dict[str, tuple[int, int]]:
        """How many experts the parameters at a path hold on this rank, and of how many, where not of all."""
        gathered = {one.path: one.size for group in self.groups for one in group.parameters}
        wholes = {user_path(path): parameter for path, parameter in self.plain.named_parameters()}
        numbers = {}
        for path, parameter in ((user_path(path), p) for path, p in self.model.named_parameters()):
            own, whole = gathered.get(path, local(parameter).shape), wholes[path].shape
            if len(own) == _EXPERTS_NDIM and own[0] != whole[0]:
                numbers[path] = own[0], whole[0]
        return numbers


def named_inputs(
    caller: str,
    model: object,
    mesh: str | None,
    args: Sequence[Any],
    inputs: Mapping[str, Any],
    kwargs: Mapping[str, Any] | None,
    own: Mapping[str, Any],
) -> dict[str, Any]:
    """The named arguments of `model`, a module, or a factory where there is a mesh.

    own: the keywords of `caller`. Raises `OptionError` for arguments of a factory, which makes its own, and
    otherwise as `keywords`.
    """
    if mesh is None or isinstance(model, nn.Module):
        check_module(caller, model)
        assert isinstance(model, nn.Module)
        return keywords(caller, model, inputs, kwargs, own)
    if args or kwargs or inputs:
        raise OptionError(f"{caller}: a factory returns (model, args, kwargs), so it is given no arguments")
    return {}


@contextmanager
def rank_model(
    model: nn.Module | Factory,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    shape: MeshShape,
    parallel: str | None,
) -> Iterator[RankModel]:
    """Be rank 0 of a mesh of `shape` in here, with `model`.

    model: plain, to be parallelised in the ways that `parallel` names, or a factory. Raises `OptionError` for
    a mesh that cannot be made here.
    """
    with fake_ranks(shape) as mesh, _splits_in_graphs(parallel):
        if not isinstance(model, nn.Module):
            model, args, kwargs = _called(model, mesh)
        plain = model
        if parallel is not None:
            model = parallelised(model, parallel, mesh)
        shared = groups(model)
        is_split = bool(shared) or _has_shards(model)
        yield RankModel(
            model=model,
            args=args,
            kwargs=kwargs,
            groups=shared,
            mesh=mesh,
            is_split=is_split,
            plain=plain,
        )


def _splits_in_graphs(parallel: str | None) -> AbstractContextManager[None]:
    """In here the numbers of tokens that ranks send are sizes in graphs, where `ep` is a way by name."""
    captured: Any = torch._dynamo.config.capture_scalar_outputs or EXPERTS in (parallel or "").split(",")
    patched: Any = torch._dynamo.config.patch(capture_scalar_outputs=captured)
    return patched  # type: ignore[no-any-return]


def _called(factory: Factory, mesh: Any) -> tuple[nn.Module, Sequence[Any], Mapping[str, Any]]:
    """The model of `factory` with its arguments, made on the meta device."""
    try:
        with torch.device("meta"):
            result = factory(mesh) if _takes_mesh(factory) else factory()
    except MXCompileError:
        raise
    except Exception as error:  # of the user's code, whatever it is
        name = getattr(factory, "__name__", str(factory))
        raise ModelError(f"factory {name} on fake ranks: {type(error).__name__}: {error}") from error
    match result:
        case (nn.Module() as model, tuple() | list() as args, dict() as kwargs):
            return model, args, kwargs
    raise ModelError(f"the factory returned {type(result).__name__}, not (model, args, kwargs)")


def _takes_mesh(factory: Factory) -> bool:
    """Whether `factory` has a parameter without a default. It gets the mesh."""
    parameters = inspect.signature(factory).parameters.values()
    return any(parameter.default is inspect.Parameter.empty for parameter in parameters)


def _has_shards(model: nn.Module) -> bool:
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())
