"""What runs on real ranks: a step of a factory's model, with every collective that the profiler sees."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.eager_backend import EagerBackend
from helpers.ranks import on_ranks
from meshed import Prepared, fsdp, fsdp_sp, hsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import ProfilerActivity, profile

from mxcompile.ranks.shape import MeshShape

KINDS = {"allgather": "all-gather", "all_gather": "all-gather", "allreduce": "all-reduce",
         "all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter"}  # fmt: skip
DTYPES = {"float": "float32", "c10::BFloat16": "bfloat16", "unsigned char": "uint8"}
Seen = tuple[dict[str, int], dict[str, int]]
"""How often each collective was seen: by its kind and elements, and, where the trace has it, by dtype too."""
REDUCED = (fsdp, hsdp, fsdp_sp)
"""Factories after whose backward no gradient is a partial sum, which AdamW could not take."""
Case = tuple[Callable[[DeviceMesh], Prepared], str, dict[str, Any]]
"""A factory, its mesh in words, and options of the backend."""


def seen_in(trace: Path) -> Seen:
    """The collectives in a trace of the profiler, by what a rank gives to each.

    Every one goes through an operator of a process group. Those that take lists of tensors have no dtypes in
    the trace, but the functional operators around them do.
    """
    elements: Counter[str] = Counter()
    typed: Counter[str] = Counter()
    for event in json.loads(trace.read_text())["traceEvents"]:
        room, _, name = event.get("name", "").partition("::")
        kind = next((kind for start, kind in KINDS.items() if name.lstrip("_").startswith(start)), None)
        if kind is None or room not in ("c10d", "_c10d_functional"):
            continue
        index = int(room == "c10d" and kind != "all-reduce")  # results come first
        shape, dtype = (event["args"][key][index] for key in ("Input Dims", "Input type"))
        if room == "c10d":
            shapes = shape if shape and isinstance(shape[0], list) else [shape]
            elements[f"{kind} {sum(map(math.prod, shapes))}"] += 1
        if dtype in DTYPES:
            typed[f"{kind} {DTYPES[dtype]} {math.prod(shape)}"] += 1
    return dict(elements), dict(typed)


def state_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes of the parameters on this rank, of their gradients, and of what AdamW makes of both."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=False)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    kinds = {"parameters": model.parameters(), "gradients": [p.grad for p in trained], "optimizer": states}
    return {kind: sum(map(_local_bytes, tensors)) for kind, tensors in kinds.items()}


def _local_bytes(tensor: Any) -> int:
    return int((tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes)


def step(case: Case, trace: Path, *, by_block: bool) -> None:
    """Two steps, of which the second, when everything is compiled, is traced."""
    torch.manual_seed(0)
    factory, words, options = case
    shape = MeshShape.parse(words)
    model, args, kwargs = factory(init_device_mesh("cpu", shape.sizes, mesh_dim_names=shape.names))
    backend, run = EagerBackend(**options), model
    if by_block:
        for block in model.layers:
            block.compile(backend=backend)
    else:
        run = torch.compile(model, backend=backend)
    run(*args, **kwargs).float().square().mean().backward()
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        run(*args, **kwargs).float().square().mean().backward()
    profiled.export_chrome_trace(str(trace))
    trace.with_suffix(".held").write_text(json.dumps(state_bytes(model) if factory in REDUCED else {}))


def steps(cases: list[Case], by_block: bool) -> None:
    for index, case in enumerate(cases):
        step(case, Path(f"{index}-{dist.get_rank()}.json"), by_block=by_block)
        torch.compiler.reset()


def seen_by_ranks(
    cases: list[Case], ranks: int, folder: Path, *, by_block: bool
) -> list[list[tuple[Seen, dict[str, int]]]]:
    """For each of `cases`, what each of `ranks` sends in a step, and the bytes that it holds after it.

    by_block: whether blocks are compiled one by one, as torchtitan does it, and not the model whole.
    """
    on_ranks(ranks, folder, steps, cases, by_block, apart=True)
    traces = [[folder / f"{index}-{rank}.json" for rank in range(ranks)] for index in range(len(cases))]
    return [
        [(seen_in(trace), json.loads(trace.with_suffix(".held").read_text())) for trace in of_case]
        for of_case in traces
    ]
