"""The code that Inductor writes for a function of tensors on a GPU that need not be here.

The function is traced, so it may call the mx operators themselves: each then becomes the template, or the
generated kernel, that a graph with the operator runs. Nothing is compiled and nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mxcompile.compiler.session.decompositions import table
from mxcompile.lowering.graph import pipeline
from mxcompile.lowering.targets import TARGETS, Target
from mxcompile.lowering.templates import weight_only as weight_only  # registered where graphs want it
from mxcompile.offline.binary import Binary, cross_compile
from mxcompile.offline.device import move
from mxcompile.offline.driver import _CONFIG
from mxcompile.offline.standin import DEVICE, stand_in
from mxcompile.offline.wrapper import read

Function = Callable[..., Sequence[Tensor]]


def rendered(function: Function, inputs: Sequence[Tensor], target: Target) -> str:
    """The module for `target` of `function`, called with tensors like `inputs`, which may be meta tensors.

    target: may differ from its row of the table in the number of its processors.
    """
    assert not pipeline.obstacles(target)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu") for x in inputs]
        graph = make_fx(lambda *tensors: tuple(function(*tensors)), table())(*fakes)
    move(graph.graph, DEVICE)
    moved = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    written: list[str] = []

    def keep(lowered: GraphLowering) -> Any:
        source, _ = lowered.codegen()
        written.append(source.value)
        return SimpleNamespace(call=lambda _: None, __file__=__file__)

    with (
        mock.patch.dict(TARGETS, {target.name: target}),
        stand_in(target),
        config.patch(_CONFIG | pipeline.config_patches(target, "", lambda _: None, {})),
        mock.patch.object(GraphLowering, "compile_to_module", keep),
        torch.no_grad(),
    ):
        compile_fx_inner(graph, moved)
    (source,) = written
    return source


def compiled(function: Function, inputs: Sequence[Tensor], target: Target) -> tuple[Binary, int]:
    """The first kernel of that module, compiled, and how many kernels follow it."""
    (name, source), *others = read(rendered(function, inputs, target), {}).kernels.items()
    with stand_in(target):
        return cross_compile(name, source, target, lambda _: 0.0), len(others)
