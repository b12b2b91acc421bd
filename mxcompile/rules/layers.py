"""Layers from the records of a report or from a module, compared and folded for messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from mxcompile.models.blocks import Blocks
from mxcompile.models.names import joined, user_path
from mxcompile.policy import Block, Code, Layer, Policy, Role
from mxcompile.report import GemmRecord
from mxcompile.report.data.fold import Row, fold

_NAMED = 3


def layers_of(gemms: Iterable[GemmRecord]) -> tuple[Layer, ...]:
    """Returns one `Layer` per forward GEMM and attention product of `gemms`, in order.

    If nothing reads a layer's result, the graph has no forward GEMM, and the `Layer` comes from its dgrad.
    """
    gemms = tuple(gemms)
    forward = {g.name for g in gemms if g.gemm == "fprop"}
    return tuple(
        Layer(
            name=g.name,
            role=Role(g.role),
            module=g.module,
            m=g.m,
            n=g.n if g.gemm == "fprop" else g.k,
            k=g.k if g.gemm == "fprop" else g.n,
            block=None if g.block is None else Block(*g.block),
        )
        for g in gemms
        if g.gemm == "fprop" or (g.gemm == "dgrad" and g.name not in forward and g.code != Code.ROLE)
    )


def folded(layers: Iterable[Layer]) -> list[Row]:
    """Returns `layers` as rows of equal role, class and sizes, whose names differ only in numbers."""
    return fold(
        GemmRecord(
            name=layer.name,
            role=layer.role,
            gemm="fprop",
            m=layer.m,
            n=layer.n,
            k=layer.k,
            precision="",
            reason=layer.module,  # keeps layers of different classes in different rows
            module=layer.module,
        )
        for layer in layers
    )


def spelled(layers: Sequence[Layer]) -> str:
    """Returns the folded names of `layers`, shortened to the first few and a count."""
    counts: dict[str, int] = {}
    for row in folded(layers):
        counts.setdefault(row.name or "(root)", row.count)  # counts both products of an attention once
    names = [*counts][:_NAMED]
    rest = sum([*counts.values()][_NAMED:])
    return f"{', '.join(names)} and {rest} more" if rest else ", ".join(names)


def name_signature(
    policy: Policy, module: nn.Module, path: str, blocks: Blocks
) -> tuple[tuple[bool, ...], ...]:
    """Returns whether each rule of `policy` selects each layer of `module` by name and block.

    Modules of one class with equal signatures get equal decisions, so they can share compiled code. path:
    path of `module` in the model. blocks: blocks of the model.
    """
    inner = [name for name, _ in module.named_modules()]
    inner += [name for name, _ in module.named_parameters()]
    full = [user_path(joined(path, name)) for name in inner]
    layers = [(name, blocks.position(name)) for name in full]
    return tuple(tuple(rule.match.places(*layer) for rule in policy.rules) for layer in layers)
