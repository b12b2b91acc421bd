"""Traces a captured graph through the hooks without loading the generated code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import compile_fx

from mxcompile.compiler.hooks.compilation import Compilation
from mxcompile.compiler.session.decompositions import table


def trace(
    compilation: Compilation,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    inner_compile: Callable[..., Any] | None = None,
    patches: Mapping[str, Any] | None = None,
) -> None:
    """Runs the hooks of `compilation` on a copy of `gm`, through compile_fx without caches.

    Inductor's own passes run too, so that the result equals a compile. inner_compile: replaces Inductor's
    code generation. Default: only the last hook. patches: overrides of Inductor's configuration.
    """

    def lowered(graph: fx.GraphModule, _: Any, **__: Any) -> Any:
        compilation.lower(graph.graph)
        return Unused()

    with (
        functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
        torch._guards.tracing(None),  # separate from an enclosing compile
    ):
        compile_fx(
            copied(gm),
            list(example_inputs),
            inner_compile=inner_compile or lowered,
            config_patches={**compilation.config_patches(), "force_disable_caches": True, **(patches or {})},
            decompositions=table(),
        )


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Returns `gm` with a copied graph, the same parameters, and Dynamo's notes about its inputs."""
    result = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    result.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        result._param_name_to_source = gm._param_name_to_source
    for old, new in zip(gm.graph.nodes, result.graph.nodes, strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
            new.meta.pop("grapharg", None)  # it refers to the parameter; only Dynamo's graph needs it
    return result


class Unused:
    """Placeholder for compiled code that is never called."""

    _boxed_call = True

    def __call__(self, *_: Any) -> Any:
        """Raises `AssertionError`."""
        raise AssertionError("code that was only traced or generated is called")
