"""Expert parallelism: each rank has some experts, and tokens are exchanged with two all-to-alls.

    rows      tokens sorted by expert; a token appears once for every expert in its top k
    dispatch  all_to_all_single of the row counts, then of the rows
    experts   the module's own forward with this rank's experts and one choice for each row
    combine   all_to_all_single of the results; each token sums its results, weighted by the router

Applies to modules with the signature of transformers, ``experts(hidden_states, top_k_index, top_k_weights)``,
whose parameters have the experts as their first dimension.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

from mxcompile.errors import OptionError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

EXPERTS = "ep"
"""Mesh axis of expert parallelism."""
_FORM = ["hidden_states", "top_k_index", "top_k_weights"]


def experts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields (path, module) for every experts module of `model` that `spread_` supports."""
    for path, module in model.named_modules():
        number = getattr(module, "num_experts", None)
        sizes = {p.shape[0] for p in module.parameters(recurse=False)}
        if isinstance(number, int) and sizes == {number}:
            forward: Any = inspect.unwrap(type(module).forward)
            if list(inspect.signature(forward).parameters)[1:] == _FORM:
                yield path, module


def spread_(module: nn.Module, mesh: DeviceMesh, path: str = "") -> None:
    """Removes from the experts `module`, in place, all experts but this rank's share.

    mesh: one-dimensional. Raises `OptionError` if the experts are not a multiple of the ranks.
    """
    ranks, number = mesh.size(), int(module.num_experts)  # type: ignore[arg-type]
    if number % ranks:
        raise OptionError(f"ep cannot spread {path}: {number} experts are not a multiple of {ranks} ranks")
    per_rank = number // ranks
    first = mesh.get_local_rank() * per_rank
    for name, parameter in module.named_parameters(recurse=False):
        part = parameter.detach()[first : first + per_rank].clone()
        setattr(module, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    kind: Any = type(module)
    module.__class__ = _on_ranks(kind)  # the object stays, so references and hooks stay valid
    assert isinstance(module, _OnRanks)
    module.num_experts, module.ep_group = per_rank, mesh.get_group()


def is_spread(module: nn.Module) -> bool:
    """Whether `spread_` has changed `module`."""
    return isinstance(module, _OnRanks)


@functools.cache
def _on_ranks(kind: Any) -> Any:
    return type(kind.__name__, (_OnRanks, kind), {"__module__": kind.__module__})


class _OnRanks(nn.Module):
    """Base of experts modules that `spread_` has changed. ep_group: process group of the axis `ep`."""

    ep_group: Any
    num_experts: int

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns the weighted sum of the experts' results, [tokens, features].

        top_k_index, top_k_weights: [tokens, top_k], the chosen experts and the router's weights.
        """
        group, per_rank, top_k = self.ep_group, self.num_experts, top_k_index.shape[-1]
        choices = top_k_index.flatten()
        order = choices.argsort(stable=True)
        counts = choices.new_zeros(group.size() * per_rank).scatter_add(0, choices, torch.ones_like(choices))
        counts = counts.view(-1, per_rank)
        received = all_to_all_single(counts, None, None, group)  # row counts, [ranks, per_rank]
        to_ranks, from_ranks = counts.sum(1).tolist(), received.sum(1).tolist()
        rows = all_to_all_single_autograd(hidden_states[order // top_k], from_ranks, to_ranks, group)
        experts = torch.arange(per_rank, device=choices.device).repeat(group.size())
        experts = experts.repeat_interleave(received.flatten(), output_size=rows.shape[0]).unsqueeze(-1)
        once = torch.ones_like(experts, dtype=top_k_weights.dtype)
        results = super().forward(rows, experts, once)
        results = all_to_all_single_autograd(results, to_ranks, from_ranks, group)
        weighted = results * top_k_weights.flatten()[order].unsqueeze(-1)
        unsorted = weighted[order.argsort()].view(-1, top_k, hidden_states.shape[-1])
        return unsorted.sum(1).to(hidden_states.dtype)
