"""Maps the inputs and modules of a captured graph to paths in the user's model, by object identity.

    L['args'][0].layers.0.up.weight  ─▶  the objects along this source  ─▶  layers.0.up.weight

Dynamo names an input by its access path from a variable of the frame, which depends on decorators, closures
and checkpoints. Paths therefore come from the objects along the access path. The text of a step counts only
for objects outside the model's tree: members of a plain list, tensors that replace parameters during a call
(FSDP, ``torch.func.functional_call``), and modules without a model.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, fx, nn

from mxcompile.compiler.session.frames import Frame
from mxcompile.models.names import HELD_BYTES, WRAPPERS, GraphInput, HeldBy, joined, user_path, within
from mxcompile.models.tree import Tree, unregistered
from mxcompile.models.wrappers import plain_class

_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_STEP = re.compile(rf"""\[({_QUOTED})\]|,\ ({_QUOTED})\)|\[(\d+)\]|\.?([^.\[]+?)(?=[.\[]|$|,\ ['"])""")
_VARIABLE = re.compile(rf"^([LG])\[({_QUOTED})\]")
_LAST_KEY = re.compile(rf".\[({_QUOTED})\]$")
_CONTAINERS = frozenset({"__dict__", "__self__", "_modules", "_parameters", "_buffers"})
_PROGRAM = (nn.Module, FunctionType, MethodType, functools.partial, type)
_CLASS = re.compile(r"dict\(type\((.*?)\)(?:\.__mro__\[\d+\])?\.__dict__\)")
"""Access to attributes of a class, which its instances share."""
_CELLS = "__closure__"
_OF_MODEL = ("L['self']", "L['___stack")
"""Variables of a method that hold its module, or submodules across graph breaks."""
_DYNAMOS = ("__import_", "___stack")
"""Prefixes of Dynamo's own variables: modules of inlined functions, values across graph breaks."""


@lru_cache(maxsize=1 << 14)
def steps_of(source: str) -> tuple[str, ...]:
    """Returns the variable, attributes and keys in a source name of Dynamo, without wrappers.

    ``L['self']._modules['layers'].0.fc`` and ``L['self'].__dict__['_modules']['layers']['0'].fc`` (for a
    module with its own ``__getattr__``) both give the variable, ``layers``, ``0`` and ``fc``.
    """
    source = _CLASS.sub(r"\1", source)
    while source.startswith("getattr("):  # getattr(BASE, 'name') has the steps of BASE, then name
        source = source.removeprefix("getattr(")
    variable = _VARIABLE.match(source)
    matches = _STEP.findall(source[variable.end() :] if variable else source)
    steps = (ast.literal_eval(key or name) if key or name else index or plain
             for key, name, index, plain in matches)  # fmt: skip
    return (variable[0] if variable else "", *(s for s in steps if s not in _CONTAINERS | WRAPPERS))


class Located:
    """The inputs and modules of the graph `gm` of `root`, called with `values`.

    tree: tree of the model, or of the models of a function. inputs: description of each input. readers: all
    modules on the way to an input, in the tree or not. matrices: paths of the parameters and buffers with two
    or more dimensions. holder: for a graph without root, the only module that holds its parameters or that it
    calls, else None. prefix: path of the module with most of the parameters, or of one around it. owners:
    Dynamo's source and the path of each module through which the code reads parameters, the model itself
    excepted. module: path of the module whose code is compiled.
    """

    def __init__(
        self, gm: fx.GraphModule, values: Sequence[Any], root: nn.Module | None, frame: Frame
    ) -> None:
        placeholders = gm.graph.find_nodes(op="placeholder")
        pairs = list(zip(map(source_of_input, placeholders), values, strict=False))
        names = dict.fromkeys(name_of(step) for source, _ in pairs for step in _way(source))
        self._objects = {name: frame.evaluate(name) for name in names}
        self.readers = tuple(value for value in self._objects.values() if isinstance(value, nn.Module))
        self._defaults = frame.defaults
        ways = [[self._objects[name_of(step)] for step in _way(source)] for source, _ in pairs]
        stacks = (node.meta.get("nn_module_stack") for node in gm.graph.nodes)
        called = dict.fromkeys(next(iter(stack.values()))[0] for stack in stacks if stack)
        self.holder = _holder(ways, [[frame.evaluate(name)] for name in called])
        name, model = frame.name_of(root), root or (None if frame.models and frame.parts else self.holder)
        model = model or (None if frame.parts else frame.model)
        self.tree = Tree(frame.models if name or model is None else {"": model})
        paths_by_name = {name: self.tree.paths(value) for name, value in self._objects.items()}
        self._paths_by_name = {steps_of(name): paths for name, paths in paths_by_name.items() if paths}
        paths = [self._path(source, value) for source, value in pairs]
        inputs = tuple(map(self._input, paths, *zip(*pairs, strict=True))) if pairs else ()
        counted = Counter(entry.path for entry in inputs if entry.unregistered)
        self.inputs = tuple(
            replace(entry, path=self._named(source, of_function=True)) if is_doubled else entry
            for entry, (source, _) in zip(inputs, pairs, strict=True)
            for is_doubled in [entry.unregistered is not None and counted[entry.path] > 1]
        )
        self.matrices = tuple(
            path
            for path, (_, value) in zip(paths, pairs, strict=True)
            if path and isinstance(value, Tensor) and value.ndim > 1
        )
        owners = [self._owner(source) for path, (source, _) in zip(paths, pairs, strict=True) if path]
        modules = [(source, path) for source, path in owners if path is not None]
        self.prefix = _prefix(modules, self.tree.modules) if modules else name
        self.owners = tuple({name_of(source): (source, path) for source, path in modules if path}.values())
        running = self._running(frame)
        self.module = self.tree.paths(running)[0] if running is not None else self.prefix
        self._name_modules(gm, running)

    def _running(self, frame: Frame) -> nn.Module | None:
        """Returns the module of the tree whose code `frame` runs."""
        called = [call.module for call in frame.running[:1] if call.directly]
        # a function of several models is the code of none of them
        owners = self.owners if len(self.tree.roots) == 1 else ()
        read = [self._objects[name_of(source)] for source, path in owners if path == self.prefix]
        candidates = (frame.locals.get("self"), *called, *read)
        modules = (value for value in candidates if isinstance(value, nn.Module))
        return next((module for module in modules if self.tree.paths(module)), None)

    def _name_modules(self, gm: fx.GraphModule, running: nn.Module | None) -> None:
        """Replaces the paths in ``nn_module_stack`` of all nodes by the user's paths."""
        outside = {} if running is None else {str(id(running)): (self.module, plain_class(running))}
        graphs = (module.graph for module in gm.modules() if isinstance(module, fx.GraphModule))
        for node in (node for graph in graphs for node in graph.nodes):
            stack = node.meta.get("nn_module_stack") or {}
            named = {}
            for key, (raw, kind) in stack.items():  # the key is the module's id, with a call count after @
                identity, path = key.partition("@")[0], self._path_of(raw)
                paths = self.tree.by_identity.get(int(identity), ()) if identity.isdecimal() else ()
                named[key] = (path if path in paths or not paths else paths[0], kind)
            node.meta["nn_module_stack"] = named or outside

    def _input(self, path: str | None, source: Any, value: Any) -> GraphInput:
        """Returns the description of input `value`, a parameter or buffer if it has a `path`."""
        if path is not None:
            others = tuple(other for other in self.tree.paths(value) if path and other != path)
            is_parameter, num_bytes = isinstance(value, nn.Parameter), getattr(value, HELD_BYTES, None)
            return GraphInput(
                path=path, others=others, static=True, is_parameter=is_parameter, held_bytes=num_bytes
            )
        if source is None or not isinstance(value, Tensor):
            return GraphInput()
        is_held = self._is_held(source)
        path = self.tree.unregistered_path(value) if is_held or len(_way(source)) > 1 else ""
        where = HeldBy.HELD if is_held or path else unregistered(value)
        return GraphInput(path=path or self._named(source), unregistered=where)

    def _named(self, source: Any, *, of_function: bool = False) -> str:
        """Returns the path of an unregistered tensor. For a closure it begins with the variable's name.

        of_function: whether the path of the closure's function comes first, for two closures of one variable.
        """
        cells = [step for step in _way(source) if getattr(step, "freevar_name", "")]
        if not cells or self._owner(source)[1] is not None:
            return self._path_of(name_of(source))
        cell = cells[-1]
        steps = steps_of(name_of(cell))
        behind = steps_of(name_of(source))[len(steps) :]
        before = _spelled(steps[: steps.index(_CELLS)]) if of_function and _CELLS in steps else ()
        return joined(*before, cell.freevar_name, *behind)

    def _is_held(self, source: Any) -> bool:
        """Whether a default, a global, a closure or an object of the program holds the tensor at `source`."""
        variable, *way = _way(source)
        objects = (self._objects[name_of(step)] for step in way[:-1])
        return (
            any(self._objects[name_of(variable)] is default for default in self._defaults)
            or name_of(variable).startswith(("G[", "L['self']"))
            or getattr(variable, "is_derefed_cell_contents", False)
            or any(isinstance(value, _PROGRAM) for value in (self._objects[name_of(variable)], *objects))
        )

    def _path_of(self, name: str) -> str:
        """Returns the path for a source name of Dynamo."""
        path, steps = None, steps_of(name)
        for end, step in enumerate(steps, 1):
            paths = self._paths_by_name.get(steps[:end], ())
            longer = None if path is None else joined(path, step)
            path = paths[0] if paths and longer not in paths else longer
        return joined(*_spelled(steps)) if path is None else path

    def _path(self, source: Any, value: Any) -> str | None:
        """Returns the path of a parameter or buffer, "" if it is unknown, and None for other values."""
        raw = name_of(source)
        path, paths = self._path_of(raw), self.tree.paths(value)
        if paths:
            return path if path in paths else paths[0]
        if self._paths_by_name.get(steps_of(raw)) or isinstance(value, nn.Parameter):
            return path
        if "_parameters[" in raw or "_buffers[" in raw:
            return path
        if not isinstance(value, Tensor):
            return None
        if self._owner(source)[1] is not None and path in self.tree.tensors:
            return path
        key = _LAST_KEY.search(raw, 1)  # from 1: the variable's own key does not count
        path = user_path(str(ast.literal_eval(key[1]))) if key else ""
        return path if path in self.tree.tensors else None

    def _owner(self, source: Any) -> tuple[Any, str | None]:
        """Returns (source, path) of the outermost module of the model along `source`."""
        for step in _way(source):
            value = self._objects[name_of(step)]
            if isinstance(value, nn.Module) and (paths := self.tree.paths(value)):
                return step, paths[0]
        return None, None


def name_constants(graph: fx.Graph, tree: Tree) -> None:
    """Names the tensors of `tree` that `graph` holds itself.

    Functions that Dynamo does not read (``nonstrict_trace``) use weights that are not inputs of its graph.
    """
    for node in graph.find_nodes(op="get_attr"):
        value = getattr(graph.owning_module, str(node.target), None)
        path = tree.unregistered_path(value) if isinstance(value, Tensor) else ""
        if paths := tree.paths(value) or [path] * bool(path):
            others, is_parameter = tuple(paths[1:]), isinstance(value, nn.Parameter)
            about = GraphInput(path=paths[0], others=others, static=True, is_parameter=is_parameter)
            node.meta["desc"] = about


def _prefix(owners: Sequence[tuple[Any, str]], modules: Container[str]) -> str:
    """Returns the path of the module of `owners` that most parameters are read through, or of one around it.

    After a graph break in an expression the code reads submodules from the stack, not through ``self``. They
    are in the module whose code runs. Modules among arguments and variables may be unrelated.

    owners: source and path of a module for each parameter. modules: paths of all modules.
    """
    prefix = Counter(path for _, path in owners).most_common(1)[0][0]
    for source, path in owners:
        around = prefix
        while around and not (within(path, around) and around in modules):
            around = around.rpartition(".")[0]
        if around or name_of(source).startswith(_OF_MODEL):
            prefix = around
    return prefix


def _holder(ways: Iterable[Iterable[object]], called: Sequence[Sequence[object]]) -> nn.Module | None:
    """Returns the only module of the object chains `ways` to parameters, or the only module in `called`.

    The chain of a shared parameter names only the first of its models. So chains count if no other is called.
    """
    holder = _one_module(ways)
    if holder is not None and len(called) > 1:
        inside = {*holder.modules()}
        others = (module for (module,) in called if isinstance(module, nn.Module) and module not in inside)
        if any(True for module in others for _ in module.parameters()):
            return None
    return holder or _one_module(called)


def _one_module(ways: Iterable[Iterable[object]]) -> nn.Module | None:
    """Returns the outermost module of the object chains `ways`, or None if chains disagree."""
    outermost = [next((value for value in way if isinstance(value, nn.Module)), None) for way in ways]
    modules = {id(module): module for module in outermost if module is not None}
    return next(iter(modules.values())) if len(modules) == 1 else None


def _spelled(steps: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the steps to an object outside the model, without ``self`` and Dynamo's own variables."""
    variable = _VARIABLE.match(steps[0])
    name = ast.literal_eval(variable[2]) if variable else ""
    return steps[1:] if name == "self" or name.startswith(_DYNAMOS) else (name, *steps[1:])


def source_of_input(node: fx.Node) -> Any:
    """Returns Dynamo's source of an input, or None for inputs that Dynamo did not create."""
    return getattr(node, "_dynamo_source", None) or getattr(node.meta.get("grapharg"), "source", None)


def name_of(source: Any) -> str:
    """Returns the name of a source, a Python expression, or "" for None."""
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


def _way(source: Any) -> list[Any]:
    """Returns the chain of sources up to `source`, beginning with the variable."""
    way: list[Any] = []
    while source is not None:
        way.append(source)
        source = getattr(source, "base", None)
    return way[::-1]
