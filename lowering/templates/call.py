"""Calls of templates, as choices of Inductor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import empty_strided
from torch._inductor.select_algorithm import TritonTemplate, autotune_select_algorithm
from torch._inductor.virtualized import V

from mxcompile.lowering.choices.epilogue import is_heavy
from mxcompile.lowering.inductor import fp_fusion, winners
from mxcompile.lowering.templates.examples import Make
from mxcompile.ops import Spec

Tried = Iterable[tuple[Any, Mapping[str, Any]]]
"""Templates or kernels of a library, each with its arguments."""


def choices_of(operands: Sequence[Any], layout: ir.Layout, tried: Tried) -> list[Any]:
    """Returns the choices for Inductor. Raises the error with which Inductor rejects a choice."""
    choices: list[Any] = []
    for template, arguments in tried:
        options = {"triton_meta": fp_fusion.stated()} if isinstance(template, TritonTemplate) else {}
        nodes = {"input_nodes": tuple(operands), "layout": layout}
        error = template.maybe_append_choice(choices, **nodes, **options, **arguments)
        if error is not None:
            raise error
    return choices


def only(
    template: Any,
    operands: Sequence[Any],
    results: Sequence[Spec],
    *,
    last: Sequence[Any] = (),
    **arguments: Any,
) -> list[ir.TensorBox]:
    """Returns the results of `template`, the only choice.

    results: shape and dtype of the template's result, then of the tensors that its kernel writes besides, for
    which it has pointers after `operands`. last: operands after these pointers. All operands are realized.
    """
    device = operands[0].get_device_or_error()
    (shape, dtype), *others = results
    buffers = [empty(device, *other) for other in others]
    written = [buffer.data for buffer in buffers]
    arguments["mutated_inputs"] = written or None
    inputs, layout = [*operands, *written, *last], ir.FixedLayout(device, dtype, list(shape))
    choices = choices_of(inputs, layout, [(template, arguments)])
    chosen: Any = autotune_select_algorithm(template.name, choices, inputs, layout)
    return [chosen[0] if isinstance(chosen, tuple) else chosen, *buffers]


def empty(device: torch.device, shape: Sequence[Any], dtype: torch.dtype) -> ir.TensorBox:
    """Returns an empty buffer, for a kernel that writes more than its result."""
    result: ir.TensorBox = empty_strided(list(shape), None, dtype=dtype, device=device)
    result.realize()
    return result


def best(
    name: str,
    operands: Sequence[Any],
    layout: ir.Layout,
    tried: Tried,
    *,
    labels: Sequence[str] = (),
    examples: Mapping[int, Make] | None = None,
    at_once: bool = False,
) -> ir.TensorBox:
    """Returns the result of the product called `name`, by the choice of Inductor (see `winners.choose`).

    labels: names of the choices in the record; if empty, their tiles.
    """
    choices = choices_of(operands, layout, tried)
    result = winners.choose(name, choices, operands, layout, labels, examples=examples, at_once=at_once)
    if len(choices) == 1 and is_heavy(V.graph.current_node):  # with several, Inductor times the fusion
        V.graph.no_fuse_buffer_names.add(result.get_name())
    return result
