"""The collectives of a training step on one rank: kind, bytes, mesh axis, phase and count.

    FSDP2                gathers of weights, reductions of gradients        from its parameter groups
    tensor parallelism   activations and their gradients                    from the partitioned graphs
    partial gradients    each tensor-parallel rank has one summand, e.g. for a norm over its own tokens;
                         backward leaves them partial, and FSDP2 reduces them one by one before its reduction

`num_bytes` is the size of a collective's input on one rank: 1/p of the output for an all-gather over p
ranks, the whole unreduced tensor for a reduce-scatter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from mxcompile.distributed.tensors import local_bytes
from mxcompile.graph.opsets import packet
from mxcompile.graph.tags import tensor
from mxcompile.models.names import module_of, user_path
from mxcompile.passes.account import sent
from mxcompile.ranks.fsdp import FSDPGroup, prefetched

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast")

SEND = "send"
"""Kind of a point-to-point transfer between pipeline stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """A collective in which a rank takes part at every step.

    kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast" or "send". what: "weights",
    "gradients" or "activations", which in backward are mostly their gradients. name: module path. dtype:
    torch's name. num_bytes: bytes that this rank contributes; without_bytes: the same without mxcompile.
    axis: mesh axis. ranks: size of the process group. stride: difference of neighbouring rank numbers. phase:
    "forward" or "backward".
    """

    kind: str
    what: str
    name: str
    dtype: str
    num_bytes: int
    without_bytes: int
    axis: str
    ranks: int
    stride: int
    phase: str


class Axes:
    """Maps process groups to the names of the axes of a mesh.

    strides: differences of neighbouring rank numbers, by axis.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        names = mesh.mesh_dim_names or ()
        self._names: dict[Any, str] = {mesh.get_group(name).group_name: name for name in names}
        for name, joined in getattr(mesh._get_root_mesh(), "_flatten_mapping", {}).items():
            self._names.setdefault(joined.get_group().group_name, name)
        self.strides = {name: stride(mesh.get_group(name)) for name in names}

    def __call__(self, group: Any) -> str:
        """Returns the axis name of a process group or group name; "n ranks" if the group is not an axis."""
        name = group if isinstance(group, str) else group.group_name
        return self._names.get(name) or f"{len(_ranks(group))} ranks"

    def collective(self, group: Any, num_bytes: int, *, dtype: Any, **fields: Any) -> Collective:
        """Returns a collective of `group`. fields: other fields; `without_bytes` defaults to `num_bytes`."""
        return Collective(
            axis=self(group),
            ranks=len(_ranks(group)),
            stride=stride(group),
            dtype=str(dtype).removeprefix("torch."),
            num_bytes=num_bytes,
            **{"without_bytes": num_bytes} | fields,
        )


def _ranks(group: Any) -> list[int]:
    from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
        _resolve_process_group,
        get_process_group_ranks,
    )

    named: Any = _resolve_process_group
    return get_process_group_ranks(named(group) if isinstance(group, str) else group)


def stride(group: Any) -> int:
    """Returns the difference between the first two ranks of a process group or group name; 1 for one rank."""
    ranks = _ranks(group)
    return ranks[1] - ranks[0] if len(ranks) > 1 else 1


def of_groups(groups: Sequence[FSDPGroup], axes: Axes, reached: Collection[str]) -> Iterator[Collective]:
    """Yields the collectives that FSDP2 runs in a step, in which each of `groups` runs once.

    reached: paths of modules and parameters that backward reaches.
    """
    trained = {group.path for group in groups if group.is_reached(reached)}
    gathered = trained | {*prefetched(groups, trained).values()}
    for group in groups:
        if group.ranks > 1:
            yield _gather(group, axes, group.shards, "forward")
        if group.path in gathered and group.backward is not None and group.backward.size() > 1:
            yield _gather(group, axes, group.backward, "backward")
        if group.path in trained:
            yield from _reductions(group, axes, reached)


def _gather(group: FSDPGroup, axes: Axes, along: Any, phase: str) -> Collective:
    """Returns the all-gather of `group` in `phase` over the ranks `along`; fewer ranks send larger shares."""
    dtypes = {parameter.dtype for parameter in group.parameters if not parameter.is_mx}
    bytes_alone = any(parameter.is_mx for parameter in group.parameters) or len(dtypes) > 1
    share = group.ranks // along.size()
    return axes.collective(
        along,
        share * sum(p.travels for p in group.parameters),
        without_bytes=share * sum(p.numel * p.dtype.itemsize for p in group.parameters),
        kind="all-gather",
        what="weights",
        name=group.path,
        dtype="uint8" if bytes_alone else dtypes.pop(),
        phase=phase,
    )


def _reductions(group: FSDPGroup, axes: Axes, reached: Collection[str]) -> Iterator[Collective]:
    sizes = [p.numel for p in group.parameters if p.parameter.requires_grad and p.path in reached]
    dtype = group.reduced
    if dtype is None or not sizes:
        return
    shard_bytes = dtype.itemsize * sum(sizes)
    ways = (("reduce-scatter", group.shards, group.ranks), ("all-reduce", group.replicates, 1))
    for kind, along, times in ways:
        if along is not None and along.size() > 1:
            yield axes.collective(
                along,
                times * shard_bytes,
                kind=kind,
                what="gradients",
                name=group.path,
                dtype=dtype,
                phase="backward",
            )


def of_graph(
    graph: fx.Graph, axes: Axes, phase: str, others: Callable[[str], Iterable[str]]
) -> Iterator[Collective]:
    """Yields the collectives of `graph`, repeated for the `others` of each path (equal layers)."""
    for node, num_bytes, without_bytes in sent(graph):
        path = module_of(node)[0]
        operator = str(packet(node)).rpartition(".")[2].replace("_", "-")
        first = node.args[0]
        value = tensor(first[0] if isinstance(first, list | tuple) else first)
        group = next(arg for arg in reversed(node.args) if isinstance(arg, str))
        collective = axes.collective(
            group,
            num_bytes,
            without_bytes=without_bytes,
            kind=next(kind for kind in _KINDS if operator.startswith(kind)),
            what="activations",
            name=path,
            dtype="" if value is None else value.dtype,
            phase=phase,
        )
        yield collective
        for other in others(path):
            yield dataclasses.replace(collective, name=other)


def backward(output: Any) -> None:
    """Runs backward from all differentiable tensors in `output`, which are fake."""
    if results := _differentiable(output):
        torch.autograd.backward([value.sum() for value in results])


def result_bytes(output: Any) -> int:
    """Returns the bytes of this rank's part of the differentiable tensors in `output`."""
    return sum(map(local_bytes, _differentiable(output)))


def _differentiable(output: Any) -> list[Tensor]:
    return [value for value in tree_leaves(output) if isinstance(value, Tensor) and value.requires_grad]


def partial_parameters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields (path, parameter) for each parameter of `model` whose gradient is partial."""
    for path, parameter in model.named_parameters():
        placements = getattr(parameter.grad, "placements", ())
        if any(placement.is_partial() for placement in placements):
            yield user_path(path), parameter


def of_partial_gradients(model: nn.Module, axes: Axes) -> Iterator[Collective]:
    """Yields the collectives that reduce the partial gradients of `model`."""
    for path, parameter in partial_parameters(model):
        gradient = parameter.grad.to_local()
        for axis, placement in enumerate(parameter.grad.placements):
            if placement.is_partial():
                replicated = parameter.placements[axis].is_replicate()
                yield axes.collective(
                    parameter.grad.device_mesh.get_group(axis),
                    gradient.nbytes,
                    kind="all-reduce" if replicated else "reduce-scatter",
                    what="gradients",
                    name=path,
                    dtype=gradient.dtype,
                    phase="backward",
                )
