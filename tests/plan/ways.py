"""The ways in which one model is compiled in pieces, on the passes alone: each gives what to call.

A way takes a family's model and the options of the backend. Values are outputs and whole gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import families
import torch
from families import Family
from helpers.eager_backend import EagerBackend
from torch import Tensor, nn
from torch._dynamo.backends.distributed import DDPOptimizer
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import mxcompile
from mxcompile.report import GemmRecord, Report
from mxcompile.report.data.record import NOT_COMPILED

Call = Callable[..., Tensor]
Row = tuple[str, str, str, str, tuple[Any, ...]]


def stacks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of `model` by path."""
    return {
        f"{path}.{index}": block
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for index, block in enumerate(module)
    }


def policy(model: nn.Module) -> dict[str, Any]:
    """The first block stays in BF16, the third block's gradients are E5M2."""
    first, _, third, *_ = stacks(model)
    rules = [
        {"match": {"name": f"{first}.*"}, "use": "bf16"},
        {"match": {"name": f"{third}.*"}, "use": {"precision": "mxfp8", "grad_dtype": "e5m2"}},
    ]
    return {"version": 1, "preset": "nvidia", "rules": rules}


def _row(gemm: GemmRecord) -> Row:
    return gemm.name, gemm.role, gemm.gemm, gemm.precision, gemm.formats


def rows(report: Report) -> set[Row]:
    """Name, role, GEMM, precision and formats of what was compiled."""
    return {_row(gemm) for gemm in report.gemms if gemm.kernel != NOT_COMPILED}


def pending(report: Report) -> set[Row]:
    """The same of what was not."""
    return {_row(gemm) for gemm in report.gemms if gemm.kernel == NOT_COMPILED}


def report_of_all() -> Report:
    """The report of what this process compiled, all of it one model's."""
    return Report.merged(mxcompile.reports())


def values(family: Family, call: Call) -> dict[str, Tensor]:
    """Output and gradients of one step, sharded ones whole, under the user's names."""
    family.model.zero_grad()
    y = call(*family.inputs)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    results = {"output": y.detach().clone()}
    for name, parameter in family.model.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            results[name.removeprefix("module.").replace("_orig_mod.", "")] = whole.clone()
    return results


def whole(model: nn.Module, **options: Any) -> Call:
    return torch.compile(model, backend=EagerBackend(**options))


def by_block(model: nn.Module, **options: Any) -> Call:
    backend = EagerBackend(**options)
    for block in stacks(model).values():
        block.compile(backend=backend)
    return model


def blocks_replaced(model: nn.Module, **options: Any) -> Call:
    backend = EagerBackend(**options)
    for path, block in stacks(model).items():
        owner, _, index = path.rpartition(".")
        model.get_submodule(owner)[int(index)] = torch.compile(block, backend=backend)
    return model


def front_door(model: nn.Module, **options: Any) -> Call:
    with mock.patch("mxcompile.compiler.front.Backend", EagerBackend):
        return mxcompile.compile(model, **options)


def buckets(model: nn.Module, **options: Any) -> Call:
    backend = EagerBackend(**options)
    split = DDPOptimizer(20_000, backend_compile_fn=backend, first_bucket_cap=20_000)
    return torch.compile(model, backend=split.compile_fn)


def functional(model: nn.Module, **options: Any) -> Call:
    """Weights that are no parameters: those of ``functional_call`` inside the compiled function."""

    def call(state: dict[str, Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        return functional_call(model, state, inputs)

    compiled = torch.compile(call, backend=EagerBackend(**options))

    def run(*inputs: Tensor) -> Tensor:
        return compiled({name: p.view_as(p) for name, p in model.named_parameters()}, inputs)

    return run


def compiled_autograd(model: nn.Module, **options: Any) -> Call:
    return whole(model, **options)


def checkpointed(model: nn.Module, **options: Any) -> Call:
    for block in stacks(model).values():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return whole(model, **options)


def data_parallel(model: nn.Module, **options: Any) -> Call:
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 20_000
    return whole(DistributedDataParallel(model, bucket_cap_mb=0.02), **options)


def sharded(model: nn.Module, **options: Any) -> Call:
    return whole(_shard(model), **options)


def sharded_whole(model: nn.Module, **options: Any) -> Call:
    return whole(fully_shard(model), **options)


def sharded_front_door(model: nn.Module, **options: Any) -> Call:
    return _shard(front_door(model, **options))


def _shard(model: nn.Module) -> nn.Module:
    for block in stacks(model).values():
        fully_shard(block)
    return fully_shard(model)


WAYS: dict[str, Callable[..., Call]] = {
    way.__name__: way
    for way in (
        by_block, blocks_replaced, front_door, buckets, functional, compiled_autograd, checkpointed,
        data_parallel, sharded, sharded_whole, sharded_front_door,
    )
}  # fmt: skip
HEADLESS = {by_block.__name__, blocks_replaced.__name__}
"""Where what lies outside the blocks is not compiled."""


@contextmanager
def around(way: str) -> Iterator[None]:
    """What a step of `way` runs in."""
    if way == compiled_autograd.__name__:
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=EagerBackend())):
            yield
    else:
        yield


@contextmanager
def broken(model: nn.Module, paths: set[str], points: set[str]) -> Iterator[None]:
    """Break the graph in front of the modules at `paths`, and at `points` inside their code."""
    handles = [
        model.get_submodule(path).register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
        for path in paths
    ]
    families.BROKEN.update(points)
    try:
        yield
    finally:
        families.BROKEN.clear()
        for handle in handles:
            handle.remove()
