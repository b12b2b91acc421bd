"""Experts on several ranks: a rank has some of them, and tokens travel to their experts and back.

    rows     by the numbers of their experts, each token once for every expert that it has chosen
    there    all_to_all_single of the numbers of rows, then of the rows
    experts  the module's own code, with this rank's experts and one choice for each row
    back     all_to_all_single of the results; a token adds up those of its experts, by its weights

For modules of transformers' form, ``experts(hidden_states, top_k_index, top_k_weights)``, whose parameters
have the experts as their first dimension.
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
"""The axis of experts."""
_FORM = ["hidden_states", "top_k_index", "top_k_weights"]


def experts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of all experts of `model` that can be on several ranks."""
    for path, module in model.named_modules():
        number = getattr(module, "num_experts", None)
        sizes = {p.shape[0] for p in module.parameters(recurse=False)}
        if isinstance(number, int) and sizes == {number} and _takes(module):
            yield path, module


def _takes(module: nn.Module) -> bool:
    """Whether `module` is called as transformers' experts are."""
    forward: Any = inspect.unwrap(type(module).forward)
    return list(inspect.signature(forward).parameters)[1:] == _FORM


def spread_(module: nn.Module, mesh: DeviceMesh, path: str = "") -> None:
    """Keep in `module`, a module of experts, only the experts of this rank of `mesh`, which has one axis.

    Raises `OptionError` if ranks would have different numbers of them.
    """
    ranks, number = mesh.size(), int(module.num_experts)  # type: ignore[arg-type]
    if number % ranks:
        raise OptionError(f"ep cannot spread {path}: {number} experts are not a multiple of {ranks} ranks")
    own = number // ranks
    first = mesh.get_local_rank() * own
    for name, parameter in module.named_parameters(recurse=False):
        part = parameter.detach()[first : first + own].clone()
        setattr(module, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    kind: Any = type(module)
    module.__class__ = _on_ranks(kind)
    assert isinstance(module, _OnRanks)
    module.num_experts, module.ep_group = own, mesh.get_group()


def is_spread(module: nn.Module) -> bool:
    """Whether `module` is experts of which this rank has some."""
    return isinstance(module, _OnRanks)


@functools.cache
def _on_ranks(kind: Any) -> Any:
    return type(kind.__name__, (_OnRanks, kind), {"__module__": kind.__module__})


class _OnRanks(nn.Module):
    """Experts of which this rank has some. ep_group: of the ranks that have the others."""

    ep_group: Any
    num_experts: int

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns what all experts make of `hidden_states` [tokens, features]."""
        group, own, top_k = self.ep_group, self.num_experts, top_k_index.shape[-1]
        choices = top_k_index.flatten()
        order = choices.argsort(stable=True)
        counts = choices.new_zeros(group.size() * own).scatter_add(0, choices, torch.ones_like(choices))
        counts = counts.view(-1, own)
        received = all_to_all_single(counts, None, None, group)  # rows by rank and expert
        to_ranks, from_ranks = counts.sum(1).tolist(), received.sum(1).tolist()
        rows = all_to_all_single_autograd(hidden_states[order // top_k], from_ranks, to_ranks, group)
        experts = torch.arange(own, device=choices.device).repeat(group.size())
        experts = experts.repeat_interleave(received.flatten(), output_size=rows.shape[0]).unsqueeze(-1)
        once = torch.ones_like(experts, dtype=top_k_weights.dtype)
        results = super().forward(rows, experts, once)
        results = all_to_all_single_autograd(results, to_ranks, from_ranks, group)
        weighted = results * top_k_weights.flatten()[order].unsqueeze(-1)
        unsorted = weighted[order.argsort()].view(-1, top_k, hidden_states.shape[-1])
        return unsorted.sum(1).to(hidden_states.dtype)
