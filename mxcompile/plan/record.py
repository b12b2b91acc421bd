"""Records the forward of a whole model as one FX graph while it runs on fake tensors.

    model(*args) on fakes ─▶ functionalised aten operators ─▶ fx.Graph: parameters, data, outputs

No graph breaks occur, because the model's Python code simply runs. Operators are decomposed with the
compile's table. Each node has its fake value (``val``) and its module (``nn_module_stack``), and a
parameter's placeholder has its path (``desc``), in the form that the passes read. The graph has no backward,
but each node has a `Differentiated` mark, and a mark if the model keeps its value (see `read_nodes`). Code
that branches on a tensor's value raises.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum, auto
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from mxcompile.models.names import GraphInput, HeldBy
from mxcompile.models.patches import unwrapped_functional
from mxcompile.models.tree import strays, unregistered

_KEY, _CUSTOM = "mx_differentiated", "custom"
"""`_KEY` within ``meta[_CUSTOM]``, which torch copies from node to node unchanged."""
_KEPT = "mx_kept"
"""In the metadata of nodes whose values outlive the call, although the model does not return them."""
_CALL = "source_fn_stack"
_CHECKPOINT, _METHOD = "torch/utils/checkpoint.py", "apply"


class Differentiated(Enum):
    """Whether and how autograd computes gradients for the operands of a node."""

    NO = auto()  # no operand needs a gradient, or gradients are turned off
    YES = auto()
    BY_FUNCTION = auto()  # the node is in the forward of an autograd.Function with its own backward
    RECOMPUTED = auto()  # the node is in the forward of a reentrant checkpoint, whose backward recomputes it


def record(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    mode: FakeTensorMode,
    decompositions: Mapping[Any, Callable[..., Any]],
) -> fx.Graph:
    """Returns the graph of one call of `model`.

    model, args, kwargs: on fake tensors of `mode`. Exceptions of the model pass through.
    """
    parameters = dict(model.named_parameters())
    state = {**parameters, **dict(model.named_buffers())}
    paths: defaultdict[int, list[str]] = defaultdict(list)
    for path, value in model.named_parameters(remove_duplicate=False):
        paths[id(value)].append(path)
    inputs_flat, shape = tree_flatten((tuple(args), dict(kwargs)))
    indices = [index for index, leaf in enumerate(inputs_flat) if isinstance(leaf, Tensor)]
    data = [inputs_flat[index] for index in indices]
    num_results = 0

    def forward(values: list[Tensor], arguments: list[Tensor]) -> list[Tensor]:
        nonlocal num_results
        stored: dict[str, Tensor] = dict(zip(state, map(FunctionalTensor.to_functional, values), strict=True))
        leaves = list(inputs_flat)
        for index, value in zip(indices, arguments, strict=True):
            leaves[index] = FunctionalTensor.to_functional(value)
        positional, named = tree_unflatten(leaves, shape)
        marks = _Gradients()
        weights = _reparametrize_module(model, stored, tie_weights=True)
        # a method in C has no Python frame, so each `autograd.Function` runs in `_apply`
        method = partial(_apply, vars(torch.autograd.Function)[_METHOD])
        functions = mock.patch.object(torch.autograd.Function, _METHOD, classmethod(method))
        with weights, _modules_noted(model), functions, _Calls(), marks:
            results = model(*positional, **named)
        outputs = [*_tensors(results)]
        num_results = len(outputs)
        written = (*stored.values(), *(leaf for leaf in leaves if isinstance(leaf, Tensor)))
        return [*map(unwrapped_functional, (*outputs, *written, *marks.alive()))]

    with mode, enable_python_dispatcher(), FunctionalTensorMode(), traceback.preserve_node_meta():
        trace = make_fx(forward, decomposition_table=dict(decompositions), _allow_non_fake_inputs=True)
        graph = trace(list(state.values()), data).graph
    output = graph.output_node()
    values: Any = output.args[0]
    output.args = (values[:num_results],)
    for node in values[num_results:]:
        node.meta[_KEPT] = True
    inputs = [
        GraphInput(
            path=path, others=tuple(paths[id(value)][1:]), static=True, is_parameter=path in parameters
        )
        for path, value in state.items()
    ]
    inputs += (GraphInput(unregistered=unregistered(value)) for value in data)
    placeholders = graph.find_nodes(op="placeholder")
    for node, value, about in zip(placeholders, [*state.values(), *data], inputs, strict=True):
        node.meta["desc"] = about
        node.meta[_CUSTOM] = {_KEY: Differentiated.YES if value.requires_grad else Differentiated.NO}
    constants = graph.find_nodes(op="get_attr")
    stray_paths = {id(value): path for path, value in strays(model)} if constants else {}
    for node in constants:
        identity = id(getattr(graph.owning_module, str(node.target), None))
        if identity in stray_paths:
            node.meta["desc"] = GraphInput(path=stray_paths[identity], unregistered=HeldBy.HELD)
    return graph


def read_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes of a recorded `graph` whose values matter.

    A compile leaves out all others: neither a result nor a value that outlives the call depends on them. The
    latter are inputs that the model writes to, and tensors that the model puts into lists and attributes.
    """
    nodes: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in nodes or node.op == "output" or _KEPT in node.meta or node.is_impure():
            nodes.update((node, *node.all_input_nodes))
    return nodes


def differentiated(graph: fx.Graph) -> dict[fx.Node, Differentiated]:
    """Returns for each node of a recorded `graph` how backward computes its gradient, if at all."""
    by: dict[fx.Node, Differentiated] = {}
    for node in graph.nodes:
        by[node] = node.meta.get(_CUSTOM, {}).get(_KEY, Differentiated.NO)
        if by[node] in (Differentiated.BY_FUNCTION, Differentiated.RECOMPUTED):  # recorded without gradients
            needed = any(by[operand] is not Differentiated.NO for operand in node.all_input_nodes)
            by[node] = by[node] if needed else Differentiated.NO
        leaves = tree_leaves(node.meta.get("val"))
        if not any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves):
            by[node] = Differentiated.NO
    for node in reversed(graph.nodes):
        if not any(user.op == "output" or by[user] is not Differentiated.NO for user in node.users):
            by[node] = Differentiated.NO
    return by


class _Gradients(TorchDispatchMode):
    """Marks each recorded node with its `Differentiated` value, and remembers the results."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results: list[weakref.ref[Tensor]] = []

    def alive(self) -> Iterator[Tensor]:
        """Yields the results of operators that something still refers to."""
        yield from (result for reference in self._results if (result := reference()) is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, meta = kwargs or {}, traceback.current_meta
        before = {_CUSTOM: meta[_CUSTOM]} if _CUSTOM in meta else {}
        mark = Differentiated.NO if torch.is_grad_enabled() else _inside_function()
        if torch.is_grad_enabled() and func is not torch.ops.aten.detach.default:
            tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            mark = Differentiated.YES if any(leaf.requires_grad for leaf in tensors) else mark
        meta[_CUSTOM] = {**before.get(_CUSTOM, {}), _KEY: mark}
        try:
            result = func(*args, **kwargs)
        finally:
            del meta[_CUSTOM]
            meta.update(before)
        leaves = tree_leaves(result)
        self._results.extend(weakref.ref(leaf) for leaf in leaves if isinstance(leaf, FunctionalTensor))
        return result


class _Calls(TorchFunctionMode):
    """Records calls of ``F.linear`` in the metadata of their nodes, as Dynamo does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.linear:
            return func(*args, **(kwargs or {}))
        traceback.current_meta[_CALL] = [(func.__name__, func)]
        try:
            return func(*args, **(kwargs or {}))
        finally:
            traceback.current_meta.pop(_CALL, None)


def _inside_function() -> Differentiated:
    """Returns the mark of a node that is recorded with gradients disabled.

    `autograd.Function` and reentrant checkpoints run their forward without gradients, and differentiate it
    later. Only the Python stack shows that one of them is running.
    """
    frame, functions = sys._getframe(1), 0
    while frame is not None and frame.f_code is not record.__code__:
        if frame.f_code.co_filename.endswith(_CHECKPOINT):
            return Differentiated.RECOMPUTED
        functions += frame.f_code is _apply.__code__
        frame = frame.f_back  # type: ignore[assignment]
    return Differentiated.BY_FUNCTION if functions else Differentiated.NO


def _apply(method: Any, function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    """Applies `function`. `_inside_function` finds the frame of this call while the forward runs."""
    return method.__get__(None, function)(*args, **kwargs)


@contextmanager
def _modules_noted(model: nn.Module) -> Iterator[None]:
    """Records the path and class of the running module in the metadata of each new node."""
    stack: list[Any] = []
    unregistered = ((path, module) for path, module in strays(model) if isinstance(module, nn.Module))

    def leave(*_: Any) -> None:
        traceback.current_meta["nn_module_stack"] = stack.pop()

    with ExitStack() as handles:
        for path, module in (*model.named_modules(), *unregistered):
            entry = {"": (path, type(module).__qualname__)}

            def enter(_: nn.Module, __: Any, entry: Any = entry) -> None:
                stack.append(traceback.current_meta.get("nn_module_stack"))
                traceback.current_meta["nn_module_stack"] = entry

            handles.enter_context(module.register_forward_pre_hook(enter, prepend=True))
            handles.enter_context(module.register_forward_hook(leave, always_call=True))
        yield


def _tensors(value: Any, depth: int = 8) -> Iterator[Tensor]:
    """Yields the tensors of a model's result, inside mappings, sequences and dataclasses."""
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
