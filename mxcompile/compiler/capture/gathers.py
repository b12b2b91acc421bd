"""Bytes that this rank sends to FSDP2's gathers of the weights that a compiled graph reads.

    its shard of each of them     once in forward, and in backward too unless reshard_after_forward=False

FSDP2 gathers outside of compiled graphs, each weight before the graph that reads it is compiled. The gathered
tensors are read from its own state. If a torch keeps them otherwise, nothing is counted, and a warning says
so. Gradients, which are reduced as without mxcompile, are not counted either. Neither are
weights that no compiled graph reads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from mxcompile.models.fsdp_state import groups
from mxcompile.models.names import GraphInput

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathers:
    """Bytes that this rank gives: in forward, once more in backward; `_without`: as without mxcompile."""

    forward: int = 0
    forward_without: int = 0
    backward: int = 0
    backward_without: int = 0


def gathers_of(root: nn.Module | None, inputs: Iterable[GraphInput]) -> Gathers:
    """For a graph of the model `root` with `inputs`."""
    if root is None:
        return Gathers()
    read = {path for given in inputs if given.static for path in (given.path, *given.others)}
    try:
        gathers = [gathered for name, gathered in _parameters(root) if name in read]
    except AttributeError as error:
        log.warning("reports do not count what FSDP2 gathers with torch %s: %s", torch.__version__, error)
        return Gathers()
    again = [gathered for gathered in gathers if gathered[2]]
    return Gathers(
        forward=sum(sent for sent, _, _ in gathers),
        forward_without=sum(without for _, without, _ in gathers),
        backward=sum(sent for sent, _, _ in again),
        backward_without=sum(without for _, without, _ in again),
    )


def forward_dtypes(root: nn.Module) -> dict[str, torch.dtype]:
    """Returns, by path, in which dtype FSDP2 gathers the parameters for which ``param_dtype`` says one.

    Raises AttributeError with a torch that keeps it otherwise.
    """
    return {
        path: group.mp_policy.param_dtype
        for group, parameters in groups(root)
        for path, _ in parameters
        if group.mp_policy.param_dtype is not None
    }


def _parameters(root: nn.Module) -> Iterator[tuple[str, tuple[int, int, bool]]]:
    """Path of every parameter that FSDP2 has gathered, the bytes given, those without, and whether twice."""
    for group, parameters in groups(root):
        for path, parameter in parameters:
            outputs = parameter.all_gather_outputs
            if outputs:
                ranks = group.mesh_info.shard_mesh_size
                sent = sum(output.numel() * output.element_size() for output in outputs) // ranks
                dtype = parameter.param_dtype or parameter.orig_dtype
                without = parameter.padded_sharded_param_size.numel() * dtype.itemsize
                yield path, (sent, without, group.post_forward_mesh_info is not None)
