"""The forward of a whole model as one graph, recorded while it runs on fake tensors.

    model(*args) on fakes ─▶ functionalised aten operators ─▶ fx.Graph: parameters, data, outputs

Nothing can cut it: what makes Dynamo start a new graph is Python that simply runs. Operators are decomposed
as a compile decomposes them, nodes carry values (``val``) and the module they ran in (``nn_module_stack``),
and a parameter's placeholder says so (``desc``), which is what the passes read. There is no backward and no
control flow on values: a model that looks at a tensor's content cannot be recorded.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_unflatten

from mxcompile.models.names import Stored
from mxcompile.models.tree import held


def record(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    mode: FakeTensorMode,
    decompositions: Mapping[Any, Callable[..., Any]],
) -> fx.Graph:
    """The graph of `model`, on fake tensors of `mode`, called with `args` and `kwargs`, fake too.

    Raises whatever the model raises.
    """
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    paths: defaultdict[int, list[str]] = defaultdict(list)
    for path, value in model.named_parameters(remove_duplicate=False):
        paths[id(value)].append(path)
    given, shape = tree_flatten((tuple(args), dict(kwargs)))
    places = [index for index, leaf in enumerate(given) if isinstance(leaf, Tensor)]

    def forward(values: list[Tensor], data: list[Tensor]) -> list[Tensor]:
        stored: dict[str, Tensor] = dict(zip(state, map(FunctionalTensor.to_functional, values), strict=True))
        leaves = list(given)
        for place, value in zip(places, data, strict=True):
            leaves[place] = FunctionalTensor.to_functional(value)
        positional, named = tree_unflatten(leaves, shape)
        with _reparametrize_module(model, stored, tie_weights=True), _modules_noted(model):
            results = model(*positional, **named)
        return [_plain(result) for result in _tensors(results)]

    with mode, enable_python_dispatcher(), FunctionalTensorMode(), traceback.preserve_node_meta():
        trace = make_fx(forward, decomposition_table=dict(decompositions), _allow_non_fake_inputs=True)
        graph = trace(list(state.values()), [given[place] for place in places]).graph
    for node, path in zip(graph.find_nodes(op="placeholder"), state, strict=False):
        node.meta["desc"] = Stored(target=path, others=tuple(paths[id(state[path])][1:]))
    return graph


@contextmanager
def _modules_noted(model: nn.Module) -> Iterator[None]:
    """Nodes made in here know which module of `model` was running."""
    stack: list[Any] = []
    handles = []
    unregistered = ((path, module) for path, module in held(model) if isinstance(module, nn.Module))
    for path, module in (*model.named_modules(), *unregistered):
        entry = {"": (path, type(module).__qualname__)}

        def enter(_: nn.Module, __: Any, entry: Any = entry) -> None:
            stack.append(traceback.current_meta.get("nn_module_stack"))
            traceback.current_meta["nn_module_stack"] = entry

        def leave(*_: Any) -> None:
            traceback.current_meta["nn_module_stack"] = stack.pop()

        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _plain(value: Tensor) -> Tensor:
    """The tensor that operators below functionalisation see."""
    if not isinstance(value, FunctionalTensor):
        return value
    torch._functionalize_sync(value.elem)
    inner: Tensor = torch._from_functional_tensor(value.elem)
    return inner


def _tensors(value: Any, depth: int = 8) -> Iterator[Tensor]:
    """The tensors a model returns, in whatever containers."""
    if isinstance(value, Tensor):
        yield value
    elif depth:
        if isinstance(value, Mapping):
            parts: Any = value.values()
        elif isinstance(value, list | tuple):
            parts = value
        else:
            parts = vars(value).values() if dataclasses.is_dataclass(value) else ()
        for part in parts:
            yield from _tensors(part, depth - 1)
