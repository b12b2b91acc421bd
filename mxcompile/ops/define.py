"""Registers operators: a schema, a reference implementation, and the shapes and dtypes of the results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mxcompile.formats.copies import Spec as Spec

LIBRARY = torch.library.Library("mx", "DEF")
"""The library of all mx operators."""

SPECS: dict[Any, Callable[..., list[Spec]]] = {}
"""For each operator of `define`, the function from its arguments to shape and dtype of each result."""


def as_returned(op: Any, results: list[Tensor]) -> Any:
    """Returns `results` as the schema of `op` returns them: a list, a tuple, or a tensor."""
    returns = op._schema.returns
    if isinstance(returns[0].type, torch.ListType):
        return results
    return results[0] if len(returns) == 1 else tuple(results)


def define(
    schema: str, reference: Callable[..., Any], spec: Callable[..., list[Spec]], *tags: torch.Tag
) -> Any:
    """Registers the operator of `schema` with its implementation and `SPECS` row. Returns the operator."""

    def fake(x: Tensor, *arguments: Any) -> Any:
        results = [torch.empty(shape, dtype=dtype, device=x.device) for shape, dtype in spec(x, *arguments)]
        return as_returned(op, results)

    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mx::{name}", fake, lib=LIBRARY)
    op = getattr(torch.ops.mx, name).default
    SPECS[op] = spec
    return op
