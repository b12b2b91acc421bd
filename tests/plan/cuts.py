"""Models of several families, and the ways in which one is cut when it is compiled.

Every model has an embedding in front, three blocks or more, and a head behind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import models
import torch
from eager_backend import EagerBackend
from torch import nn

import mxcompile
from mxcompile.report import GemmRecord, Report
from mxcompile.report.merge import NOT_COMPILED

LAYERS = 4
FAMILIES = ("llama", "qwen3", "gpt2", "bert", "vit", "t5", "mixtral")


def build(family: str, layers: int = LAYERS) -> models.Case:
    """The same model of `family` on every call."""
    torch.manual_seed(0)
    case: models.Case = getattr(models, family)(layers)
    case.model.train()
    for module in case.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return case


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The members of the longest module lists of `model`."""
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    longest = max(len(members) for _, members in lists)
    return {
        f"{name}.{index}": block
        for name, members in lists
        if len(members) == longest
        for index, block in enumerate(members)
    }


def policy_by_index(case: models.Case) -> dict[str, Any]:
    """The first block stays in BF16, the third block's gradients are E5M2."""
    names = [*blocks_of(case.model)]
    rules = [
        {"match": {"name": f"{names[0]}.*"}, "use": "bf16"},
        {"match": {"name": f"{names[2]}.*"}, "use": {"precision": "mxfp8", "grad_dtype": "e5m2"}},
    ]
    return {"version": 1, "preset": "nvidia", "rules": rules}


def explained(case: models.Case, policy: Any = None) -> Report:
    """What `explain` says of the model."""
    return mxcompile.explain(case.model, policy=policy, target="cpu", strict=False, **case.kwargs)


Row = tuple[str, str, str, str, tuple[Any, ...]]


def rows(gemms: Iterator[GemmRecord] | tuple[GemmRecord, ...]) -> set[Row]:
    """Name, role, GEMM, precision and formats of the linear layers."""
    return {
        (g.name, g.role, g.gemm, g.precision, g.formats)
        for g in gemms
        if g.role not in ("attn_scores", "attn_values") and g.kernel != NOT_COMPILED
    }


def compiled_rows() -> set[Row]:
    """The same of everything that this process has compiled."""
    return rows(tuple(gemm for report in mxcompile.reports() for gemm in report.gemms))


def step(case: models.Case, run: Callable[..., Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of one step."""
    case.model.zero_grad()
    loss = case.loss(run(**case.kwargs))
    loss.backward()
    gradients = {name: p.grad for name, p in case.model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


def whole(case: models.Case, **options: Any) -> Callable[..., Any]:
    """The model compiled in one piece."""
    return torch.compile(case.model, backend=EagerBackend(**options))


def by_block(case: models.Case, **options: Any) -> Callable[..., Any]:
    """Every block compiled alone, as ``block.compile(backend="mxfp8", options=…)`` does."""
    backend = EagerBackend(**options)
    for block in blocks_of(case.model).values():
        block.compile(backend=backend)
    return case.model


def by_block_in_place(case: models.Case, **options: Any) -> Callable[..., Any]:
    """Every block replaced by ``torch.compile(block)``."""
    backend = EagerBackend(**options)
    for name, block in blocks_of(case.model).items():
        owner, _, index = name.rpartition(".")
        case.model.get_submodule(owner)[int(index)] = torch.compile(block, backend=backend)
    return case.model


def front_door(case: models.Case, **options: Any) -> Callable[..., Any]:
    """The model in `mxcompile.compile`, on the passes alone."""
    with mock.patch(
        "mxcompile.compiler.front.Backend",
        functools.partial(EagerBackend, before=options.pop("before", None)),
    ):
        mxcompile.compile(case.model, **options)
    return case.model


@contextmanager
def broken(model: nn.Module, paths: set[str]) -> Iterator[None]:
    """Break the graph in front of the modules at `paths`."""
    handles = [
        model.get_submodule(path).register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
        for path in paths
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
