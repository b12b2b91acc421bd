"""The modules and tensors of a model under the paths by which its code reaches them.

    self.layers = nn.ModuleList(…)       layers.0     registered: the name from `named_modules`
    self.experts = [Expert(), Expert()]  experts.0    unregistered: in a list, dict, object or global
    hook = lambda m, args, y: side(y)    layers.0.side    in a variable of a hook of layers.0, or of a method
    self.run = other.forward             run          the owner of a method

The search is bounded: objects below more than a few containers have no path.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from mxcompile.models.names import HeldBy, joined, user_path
from mxcompile.models.rebind import content, is_plain, is_torchs
from mxcompile.models.wrappers import plain_class, user_model

_DEPTH = 3
"""Largest number of containers between a module and an object: a container may hold a whole trainer."""
_MEMBERS = 10_000
"""Largest number of members of a container that are searched: a container may be a data set."""
_BASE = frozenset(vars(nn.Module()))
"""Attributes of a plain `nn.Module`."""
_FUNCTIONS = FunctionType, MethodType, functools.partial


class Tree:
    """The modules, parameters and buffers of models, by path and by identity. The models can be freed.

    roots: the models by path: "" for a single model, else the models of a function (see `models_of`).
    modules: modules by their first path; a wrapper's path gives the module inside. tensors: all paths of
    parameters and buffers. by_identity: the path of each module and all paths of each tensor, by ``id``.
    """

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self.modules = weakref.WeakValueDictionary[str, nn.Module]()
        self.tensors: set[str] = set()
        self.by_identity: defaultdict[int, list[str]] = defaultdict(list)
        self._unregistered: dict[int, str] = {}
        self.roots = weakref.WeakValueDictionary(roots)
        self._number, self._is_searched = len(roots), False
        for outer, model in roots.items():
            # a module with two paths has the first, however it is reached
            for raw, module in model.named_modules():
                self.modules[joined(outer, user_path(raw))] = module
                self.by_identity[id(module)].append(joined(outer, user_path(raw)))
            for raw, value in _tensors(model):
                self.by_identity[id(value)].append(joined(outer, user_path(raw)))
                self.tensors.add(joined(outer, user_path(raw)))

    def paths(self, value: object) -> Sequence[str]:
        """Returns all paths of `value`, or () outside the model. Searches unregistered modules on demand."""
        if isinstance(value, nn.Module) and id(value) not in self.by_identity:
            self._search()
        return self.by_identity.get(id(value), ())

    def path_of(self, module: object) -> str | None:
        """Returns the first path of `module`, or None outside the models and after one of them was freed.

        Another object may have the identity of a freed module.
        """
        paths = self.by_identity.get(id(module)) if len(self.roots) == self._number else None
        return paths[0] if paths else None

    def unregistered_path(self, tensor: Tensor) -> str:
        """Returns the path of `tensor` if the program holds it without registering it, else ""."""
        self._search()
        return self._unregistered.get(id(tensor), "")

    def _search(self) -> None:
        """Searches the unregistered modules and tensors, once."""
        roots = () if self._is_searched else [*self.roots.items()]
        self._is_searched = True
        pairs = ((outer, stray) for outer, root in roots for stray in strays(root))
        for outer, (inside, value) in pairs:
            path = joined(outer, inside)
            if id(value) in self.by_identity:
                continue
            if isinstance(value, nn.Module):
                self.by_identity[id(value)].append(path)
                self.modules.setdefault(path, value)
                for raw, tensor in _tensors(value):
                    self.by_identity[id(tensor)].append(joined(path, user_path(raw)))
            else:
                self._unregistered.setdefault(id(value), path)


def models_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Returns, by path, the models that the code of `function` names and that have parameters.

    args, kwargs: arguments of the call. Modules inside of other models are left out.
    """
    owner = getattr(function, "__self__", None)
    plain = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(plain, FunctionType) or isinstance(owner, nn.Module):
        return {}
    code = plain.__code__
    names = code.co_varnames[owner is not None : code.co_argcount]
    scopes = plain.__globals__, vars(owner) if is_plain(owner) else {}
    values = [*zip(names, args, strict=False), *kwargs.items()]
    if code.co_flags & inspect.CO_VARARGS:
        values.append((code.co_varnames[code.co_argcount + code.co_kwonlyargcount], args[len(names) :]))
    values += [(name, scope[name]) for scope in scopes for name in code.co_names if name in scope]
    values += [(name, value) for name, value in _variables(plain) if name in code.co_freevars]
    models: dict[int, tuple[str, nn.Module]] = {}
    for path, value in _parts("", values, _DEPTH):
        if isinstance(value, nn.Module) and any(True for _ in value.parameters()):
            models.setdefault(id(user_model(value)), (path, user_model(value)))
    if len(models) > 1:  # a walk through all modules takes a while, and compiled calls look here
        inner = {id(part) for _, model in models.values() for part in model.modules() if part is not model}
        models = {key: entry for key, entry in models.items() if key not in inner}
    return dict(models.values())


def path_in(root: nn.Module, module: nn.Module | None) -> str | None:
    """Returns the path of `module` in `root`, or None if it is not registered there."""
    return next((user_path(raw) for raw, candidate in root.named_modules() if candidate is module), None)


def unregistered(argument: Tensor) -> HeldBy:
    """Returns `HeldBy.LEAF` for an argument of a call that is an autograd leaf, else `ARGUMENT`."""
    is_leaf = argument.requires_grad and argument.is_leaf
    if argument._is_view() and not torch.is_grad_enabled():
        is_leaf = False  # a view made under no_grad has `is_leaf` set
    return HeldBy.LEAF if is_leaf else HeldBy.ARGUMENT


def strays(root: nn.Module) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """Yields (path, object) for modules and tensors that `root` uses without registering them.

    They are attributes of its modules, variables of the modules' methods and hooks, or globals of forwards.
    """
    seen = {id(value) for value in (*root.modules(), *(value for _, value in _tensors(root)))}
    pending = [(user_path(raw), _attributes(module)) for raw, module in root.named_modules()]
    forwards = (inspect.unwrap(plain_class(module).forward) for module in root.modules())
    scopes = {id(scope): scope for f in forwards if (scope := getattr(f, "__globals__", None))}
    for scope in scopes.values():
        if not is_torchs(scope.get("__name__")):
            named = ((key, value) for key, value in scope.items() if not isinstance(value, _FUNCTIONS))
            pending.append(("", {key: value for key, value in named if not key.startswith("__")}))
    for path, values in pending:
        for inside, value in _parts(path, values.items(), _DEPTH):
            if id(value) in seen:
                continue
            members = [("", value)]
            if isinstance(value, nn.Module):
                inner = [(raw, part) for raw, part in value.named_modules() if id(part) not in seen]
                pending += [(joined(inside, user_path(raw)), _attributes(part)) for raw, part in inner]
                members = [*inner, *_tensors(value)]
            seen |= {id(part) for _, part in members}
            yield from ((joined(inside, user_path(raw)), part) for raw, part in members)


def _attributes(module: nn.Module) -> Mapping[str, Any]:
    """Returns the attributes of `module` and its class that a plain `nn.Module` lacks, and its hooks."""
    bases = reversed(plain_class(module).__mro__)
    kinds = (kind for kind in bases if not kind.__module__.startswith(("torch.", "builtins")))
    items = [item for scope in (*map(vars, kinds), vars(module)) for item in scope.items()]
    attributes = {key: value for key, value in items if key not in _BASE and key[:2] != "__"}
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    called = (hook if isinstance(hook, _FUNCTIONS) else type(hook).__call__.__get__(hook) for hook in hooks)
    return attributes | {f"hook{index}": function for index, function in enumerate(called)}


def _parts(
    path: str, values: Iterable[tuple[Any, Any]], depth: int, method: str = ""
) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """Yields (path, object) for the modules and tensors in `values` and in its containers.

    method: name of the function whose variables `values` are. Its owner has this name instead of ``self``.
    """
    for key, item in values:
        value = item() if isinstance(item, weakref.ref) else item
        if isinstance(value, _FUNCTIONS):
            yield from _parts(path, _variables(value), depth - 1, str(key) or method) if depth else ()
            continue
        inside = joined(path, method if method and key == "self" else str(key))
        if isinstance(value, nn.Module | Tensor):
            yield inside, value
        elif depth:
            yield from _parts(inside, _members(value), depth - 1)


def _members(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, list | tuple):
        names = getattr(value, "_fields", range(_MEMBERS))  # a namedtuple has names
        return zip(names, value, strict=False)
    if isinstance(value, dict):
        return islice(value.items(), _MEMBERS)
    return vars(value).items() if is_plain(value) or isinstance(value, SimpleNamespace) else ()


def _variables(function: Any) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) for the values that the code of `function` reads from its function object."""
    match function:
        case MethodType():
            yield "", function.__func__
            owner = function.__self__
            yield from [("self", owner)] if isinstance(owner, nn.Module) else _members(owner)
        case functools.partial():
            yield "", function.func
            code = getattr(function.func, "__code__", None)
            yield from zip(code.co_varnames if code else (), function.args, strict=False)
            yield from function.keywords.items()
        case FunctionType() if not is_torchs(function.__globals__.get("__name__")):
            code, defaults = function.__code__, function.__defaults__ or ()
            yield from zip(code.co_varnames[code.co_argcount - len(defaults) :], defaults, strict=False)
            yield from (function.__kwdefaults__ or {}).items()
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
                yield from ((name, value) for value in content(cell))
        case FunctionType():  # a decorator of torch
            yield "", getattr(function, "__wrapped__", None)


def _tensors(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields (raw name, tensor) for all parameters and buffers of `root`, duplicates included."""
    yield from root.named_parameters(remove_duplicate=False)
    yield from root.named_buffers(remove_duplicate=False)


class Holders:
    """Finds the module that holds a parameter or buffer, by identity, and lets the model be freed.

    Weak references to the parameters would be simpler, but ``torch.utils.swap_tensors``, which `nn.Module.to`
    may use to change a parameter in place, rejects tensors with weak references.
    """

    def __init__(self) -> None:
        self._references: dict[int, tuple[weakref.ref[nn.Module], str]] = {}

    def holder(self, tensor: Tensor) -> tuple[nn.Module, str] | None:
        """Returns (module, name) for `tensor`, or None if no registered module holds it."""
        reference, name = self._references.get(id(tensor), (None, ""))
        module = None if reference is None else reference()
        if module is None or {**module._buffers, **module._parameters}.get(name) is not tensor:
            return None  # a new tensor may have the id of a freed or replaced one
        return module, name

    def add(self, modules: Iterable[nn.Module], only: Tensor | None = None) -> bool:
        """Registers the tensors of `modules`, or the tensor `only`. Returns whether there are any."""
        holders = {
            id(tensor): (weakref.ref(module), name)
            for module in modules
            for name, tensor in {**module._buffers, **module._parameters}.items()
            if tensor is not None and (only is None or tensor is only)
        }
        self._references.update(holders)
        return bool(holders)
