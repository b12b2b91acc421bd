"""The modules and tensors of a model, under the paths by which its code reaches them.

self.layers = nn.ModuleList(…)       layers.0     registered: the name that `named_modules` has
self.experts = [Expert(), Expert()]  experts.0    held by a list, a dictionary or an object

Walks are bounded: what lies deeper than a few containers has no path here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from mxcompile.models.names import Unregistered, joined, user_path
from mxcompile.models.rebind import is_plain

_DEPTH = 3
"""How many containers may lie between a module and what it holds: one may hold a whole trainer."""
_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


class Tree:
    """The modules, parameters and buffers of a model, by path and by identity.

    modules: each by its first path, of wrappers the module inside. tensors: all paths of parameters and
    buffers. by_identity: all paths of each object by its ``id``.
    """

    def __init__(self, root: nn.Module | None) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.tensors: set[str] = set()
        self.by_identity: defaultdict[int, list[str]] = defaultdict(list)
        self._unread = root
        if root is None:
            return
        self.modules = {user_path(raw): module for raw, module in root.named_modules()}
        for raw, module in root.named_modules(remove_duplicate=False):
            self.by_identity[id(module)].append(user_path(raw))
        for raw, value in _tensors(root):
            self.by_identity[id(value)].append(user_path(raw))
            self.tensors.add(user_path(raw))

    def paths(self, value: object) -> Sequence[str]:
        """All paths of `value`, none if the model does not have it."""
        if isinstance(value, nn.Module) and id(value) not in self.by_identity and self._unread is not None:
            root, self._unread = self._unread, None
            for path, held_object in held(root):
                self.by_identity[id(held_object)].append(path)
                if isinstance(held_object, nn.Module):
                    self.modules.setdefault(path, held_object)
        return self.by_identity.get(id(value), ())


def path_in(root: nn.Module, module: nn.Module | None) -> str | None:
    """The path of `module` in `root`, None if it is not registered there."""
    return next((user_path(raw) for raw, each in root.named_modules() if each is module), None)


def unregistered(argument: Tensor) -> Unregistered:
    """Where `argument`, a tensor that a call gives, comes from."""
    is_leaf = argument.requires_grad and argument.is_leaf
    return Unregistered.LEAF if is_leaf else Unregistered.ARGUMENT


def held(root: nn.Module) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """The modules and tensors that modules of `root` hold without registering them, and their paths."""
    seen = {id(value) for value in (*root.modules(), *(value for _, value in _tensors(root)))}
    pending = [(user_path(raw), module) for raw, module in root.named_modules()]
    for path, module in pending:
        values = ((key, value) for key, value in vars(module).items() if key not in _OWN)
        for inside, value in _parts(path, values, _DEPTH):
            if id(value) in seen:
                continue
            members = [("", value)]
            if isinstance(value, nn.Module):
                inner = [(raw, each) for raw, each in value.named_modules() if id(each) not in seen]
                pending += [(joined(inside, user_path(raw)), each) for raw, each in inner]
                members = [*inner, *_tensors(value)]
            seen |= {id(each) for _, each in members}
            yield from ((joined(inside, user_path(raw)), each) for raw, each in members)


def _parts(
    path: str, values: Iterable[tuple[Any, Any]], depth: int
) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """The modules and tensors among `values`, which are held at `path`, and inside of them."""
    for key, value in values:
        inside = joined(path, str(key))
        if isinstance(value, nn.Module | Tensor):
            yield inside, value
        elif depth:
            yield from _parts(inside, _members(value), depth - 1)


def _members(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, list | tuple):
        return enumerate(value)
    if isinstance(value, dict):
        return value.items()
    return vars(value).items() if is_plain(value) else ()


def _tensors(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of `root`, under all their raw names."""
    yield from root.named_parameters(remove_duplicate=False)
    yield from root.named_buffers(remove_duplicate=False)
