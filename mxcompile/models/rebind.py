"""Copies attributes that refer to their model: closures, methods, partials, callbacks.

    m.forward = lambda *args: original(*args)     original: a method of m
    copy.forward = the same code, with the copy's method in its cell

``copy.deepcopy`` does not copy functions, so a copied model would call the original with its real parameters.
`Rebinder` recreates each function that refers to a module or tensor of the model by its cells, defaults,
``__wrapped__`` or globals, and everything that refers to such a function. ``copy.deepcopy`` copies the rest.
"""

from __future__ import annotations

import copy
import functools
import logging
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch._dynamo.eval_frame import innermost_fn

log = logging.getLogger(__name__)

_LIMIT = 50_000
"""Largest number of values that are searched in total: a callback may refer to a whole trainer."""
_CONTAINERS = (dict, OrderedDict, list, tuple, set)
_ATOMS = frozenset({int, float, complex, str, bytes, bool, type(None), type})


class Rebinder:
    """Copies values so that references to the model become references to its copy.

    memo: memo of ``copy.deepcopy`` with the copies of all modules and tensors of the model, by ``id``.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._targets = frozenset(memo)
        self._children: dict[int, tuple[Any, ...]] = {}
        self._values: dict[int, Any] = {}  # strong references, so that no id is reused
        self._leading: set[int] = set()

    def __call__(self, value: Any) -> Any:
        """Returns a copy of `value`, or `value` itself if it cannot be copied."""
        # find the values reachable from `value` that refer to the model
        holders: defaultdict[int, list[int]] = defaultdict(list)
        pending, reached = [value], []
        while pending and len(self._values) < _LIMIT:
            node = pending.pop()
            if id(node) in self._children:
                continue
            self._values[id(node)] = node
            self._children[id(node)] = children = tuple(c for c in _referents(node) if type(c) not in _ATOMS)
            for child in children:
                holders[id(child)].append(id(node))
                if self._leads(child):
                    reached.append(id(node))
                else:
                    pending.append(child)
        while reached:
            key = reached.pop()
            if key not in self._leading:
                self._leading.add(key)
                reached += holders[key]
        return self._copied(value)

    def _copied(self, value: Any) -> Any:
        if id(value) in self._memo:
            return self._memo[id(value)]
        if id(value) in self._leading:
            return self._rebound(value)
        try:
            return copy.deepcopy(value, self._memo)
        except Exception as error:  # the copy protocol of a user's class may raise anything
            log.info("cannot copy a %s of the model, so the copy shares it: %s", type(value).__name__, error)
            return value

    def _rebound(self, value: Any) -> Any:
        """Returns a copy of `value`. A container enters the memo before its members: they may refer to it."""
        result: Any
        match value:
            case FunctionType() if (inner := _compiled(value)) is not None:
                result = self._copied(inner)
                is_disabled = getattr(value, "_torchdynamo_disable", False)
                return torch.compiler.disable(result) if is_disabled else result
            case FunctionType():
                return self._function(value)
            case MethodType():
                return MethodType(self._copied(value.__func__), self._copied(value.__self__))
            case functools.partial():
                named = {name: self._copied(item) for name, item in value.keywords.items()}
                return type(value)(self._copied(value.func), *map(self._copied, value.args), **named)
            case weakref.ref():
                return weakref.ref(self._copied(value()))
            case tuple():
                return tuple(map(self._copied, value))
            case list():
                result = self._memo[id(value)] = []
                result += map(self._copied, value)
            case set():
                result = self._memo[id(value)] = set()
                result.update(map(self._copied, value))
            case dict():
                result = self._memo[id(value)] = type(value)()
                result.update((self._copied(key), self._copied(item)) for key, item in value.items())
            case _:
                result = self._memo[id(value)] = object.__new__(type(value))
                vars(result).update((name, self._copied(item)) for name, item in vars(value).items())
        return result

    def _function(self, function: FunctionType) -> FunctionType:
        cells = tuple(CellType() for _ in function.__closure__ or ())
        named = {name: inner for name, inner in _globals(function) if self._leads(inner)}
        scope = function.__globals__
        if named:  # by `__name__` Dynamo would read the module, not `scope`
            scope = {name: inner for name, inner in scope.items() if name != "__name__"}
        function_copy = FunctionType(function.__code__, scope, function.__name__, None, cells)
        self._memo[id(function)] = function_copy
        scope.update((name, self._copied(inner)) for name, inner in named.items())
        for cell, source in zip(cells, function.__closure__ or (), strict=True):
            for value in content(source):
                cell.cell_contents = self._updated(value)
        function_copy.__defaults__ = self._updated(function.__defaults__)
        function_copy.__kwdefaults__ = self._updated(function.__kwdefaults__)
        function_copy.__qualname__, function_copy.__module__ = function.__qualname__, function.__module__
        vars(function_copy).update((name, self._updated(inner)) for name, inner in vars(function).items())
        return function_copy

    def _leads(self, value: Any) -> bool:
        return id(value) in self._targets or id(value) in self._leading

    def _updated(self, value: Any) -> Any:
        """Returns the copy of a value that refers to the model, and any other value unchanged."""
        return self._copied(value) if self._leads(value) else value


def _compiled(function: FunctionType) -> Any:
    """Returns the function that ``torch.compile`` or ``torch.compiler.disable`` wrapped, or None."""
    inner = innermost_fn(function)
    return None if inner is function else inner


def _referents(value: Any) -> Iterator[Any]:
    """Yields the values that `value` refers to and that a copy would have to copy."""
    match value:
        case FunctionType() if (inner := _compiled(value)) is not None:
            yield inner
        case FunctionType():
            if is_torchs(value.__module__) and is_torchs(value.__globals__.get("__name__")):
                return  # both, because functools.wraps copies `__module__`: a user's closure may have torch's
            for cell in value.__closure__ or ():
                yield from content(cell)
            yield from (inner for inner in (value.__defaults__, value.__kwdefaults__) if inner)
            yield from vars(value).values()
            yield from (inner for _, inner in _globals(value))
        case MethodType():
            yield from (value.__func__, value.__self__)
        case functools.partial():
            yield from (value.func, *value.args, *value.keywords.values())
        case weakref.ref():
            yield from () if (referent := value()) is None else (referent,)
        case _ if type(value) in _CONTAINERS:
            yield from (*value.keys(), *value.values()) if isinstance(value, dict) else value
        case _ if is_plain(value):
            yield from vars(value).values()


def is_torchs(module: Any) -> bool:
    """Whether `module` is the name of a module of torch."""
    return str(module or "").partition(".")[0] == "torch"


def content(cell: CellType) -> tuple[Any, ...]:
    """Returns the content of `cell`, or () if it has none yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:  # not assigned yet
        return ()


def _globals(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields the globals in the code of `function`, without functions of other files."""
    scope = function.__globals__
    for name in dict.fromkeys(_names(function.__code__)):
        value = scope.get(name)
        if not isinstance(value, FunctionType) or value.__globals__ is scope:
            yield name, value


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def is_plain(value: Any) -> bool:
    """Whether `value` consists of its attributes alone: an object without its own copy protocol."""
    kind: Any = type(value)
    return (
        kind.__new__ is object.__new__
        and hasattr(value, "__dict__")
        and not hasattr(kind, "__deepcopy__")
        and not any(vars(base).get("__slots__") for base in kind.__mro__)
    )
