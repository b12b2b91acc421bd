"""Counts the bytes that this rank sends in FSDP2's gathers of the weights of a compiled graph.

    each rank sends its shard of a weight    in forward, and again in backward if it was resharded

FSDP2 gathers each weight outside of compiled graphs, before the graph that reads it is compiled. The counts
come from FSDP2's private state. They are 0, with a warning, if a torch version has another layout. Gradient
reductions, which mxcompile does not change, and weights that no compiled graph reads are not counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from mxcompile.compiler.session.session import session_of
from mxcompile.models.fsdp import groups
from mxcompile.models.names import GraphInput, joined

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathers:
    """Bytes that this rank sends in forward and backward. Fields `…_without`: bytes without mxcompile."""

    forward: int = 0
    forward_without: int = 0
    backward: int = 0
    backward_without: int = 0


def gathers_of(root: nn.Module | None, inputs: Iterable[GraphInput]) -> Gathers:
    """Returns the bytes for the weights among the `inputs` of a graph of the model `root`."""
    if root is None:
        return Gathers()
    read = {path for entry in inputs if entry.static for path in (entry.path, *entry.others)}
    total, name = Counter[str](), session_of(root).name
    try:
        for group, parameters in groups(root):
            for path, parameter in parameters:
                outputs = parameter.all_gather_outputs
                if not outputs or joined(name, path) not in read:
                    continue
                num_bytes = sum(output.numel() * output.element_size() for output in outputs)
                sent = num_bytes // group.mesh_info.shard_mesh_size
                dtype = parameter.param_dtype or parameter.orig_dtype
                without = parameter.padded_sharded_param_size.numel() * dtype.itemsize
                total.update(forward=sent, forward_without=without)
                if group.post_forward_mesh_info is not None:  # gathered again in backward
                    total.update(backward=sent, backward_without=without)
    except AttributeError as error:
        log.warning(
            "reports do not count the bytes that FSDP2 of torch %s gathers: %s", torch.__version__, error
        )
        return Gathers()
    return Gathers(**total)


def forward_dtypes(root: nn.Module) -> dict[str, torch.dtype]:
    """Returns FSDP2's ``param_dtype`` of each parameter that has one, by path.

    Raises `AttributeError` if this torch stores FSDP2's state differently.
    """
    return {
        path: parameter.mp_policy.param_dtype
        for _, parameters in groups(root)
        for path, parameter in parameters
        if parameter.mp_policy.param_dtype is not None
    }
