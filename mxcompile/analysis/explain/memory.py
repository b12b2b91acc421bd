"""The peak memory of a step of a model, from its parameters and its report.

    training     parameters + buffers + gradients + tensors saved for backward
    inference    parameters + buffers + input and output of the largest product

Gradients have the dtype of their parameters. The optimizer, the allocator's cache and workspaces are not
included.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from mxcompile.report import Report

_BF16_BYTES = 2


def with_memory(report: Report, model: nn.Module, *, training: bool) -> Report:
    """Returns `report`, the report of `model`, with the memory figures in its summary."""
    parameters = sum(map(_size, (*model.parameters(), *model.buffers())))
    gradients = sum(_size(p) for p in model.parameters() if p.requires_grad) if training else 0
    both = ((g.flops // (2 * g.n) + g.flops // (2 * g.k)) for g in report.gemms if g.flops and g.n and g.k)
    beside = report.summary.saved_bytes if training else _BF16_BYTES * max(both, default=0)
    return dataclasses.replace(
        report,
        summary=dataclasses.replace(
            report.summary,
            parameter_bytes=parameters,
            gradient_bytes=gradients,
            peak_bytes=parameters + gradients + (beside or 0),
        ),
    )


def _size(tensor: Tensor) -> int:
    """Returns the bytes of `tensor` as stored; a sparse tensor counts with its indices."""
    stored = getattr(tensor, "stored_bytes", None)
    if stored is not None:
        return int(stored)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices().nbytes + tensor.col_indices().nbytes + tensor.values().nbytes
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices().nbytes + tensor.row_indices().nbytes + tensor.values().nbytes
    return tensor.nbytes
