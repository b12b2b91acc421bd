"""Folds equal layers of a model, so that a trace runs one of them for all.

Layers are the members of a module list. Two layers are equal if their classes, settings, parameters (shape,
dtype, gradient, mesh layout) and buffers agree, apart from the layer index, and if the policy's names and
blocks treat them equally. The first, a middle and the last layer of each kind are kept, because neighbours
can change the first and the last. The middle layer stands for the removed layers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mxcompile.graph.tags import GemmTag
from mxcompile.models.blocks import Blocks
from mxcompile.models.names import enclosing, joined
from mxcompile.models.wrappers import HOOK_OPTIONS, HOOKS
from mxcompile.policy import Policy
from mxcompile.report import GemmRecord, Part
from mxcompile.rules import name_signature

Named = TypeVar("Named", GemmRecord, GemmTag)

_INDEX = re.compile(r"(idx|index|layer_id|layer_num(ber)?|block_id|block_num(ber)?)$")
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_MODULE_DICTS = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_PARALLEL = "torch.distributed.tensor"
_STYLES = f"{_PARALLEL}.parallel.style"
_PLAIN = (int, float, complex, str, bytes, bool, type(None), type, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeats:
    """Maps the path of a kept layer to the paths of the removed layers that it stands for.

    blocks: block structure of the complete model.
    """

    standing_for: dict[str, tuple[str, ...]] = field(default_factory=dict)
    blocks: Blocks = field(default_factory=Blocks)

    def keeper(self, path: str) -> str:
        """Returns the path of the layer around `path` that stands for removed layers, or "" without it."""
        return enclosing(path, self.standing_for)

    def count(self, path: str) -> int:
        """Returns how many layers the module at `path` stands for, itself included."""
        return 1 + len(self.standing_for.get(self.keeper(path), ()))

    def expand(self, part: Part) -> Part:
        """Returns `part` with one record for every layer, removed layers included."""
        gemms = tuple(self.expanded(part.gemms))
        return dataclasses.replace(part, gemms=gemms, outline=part.outline.widened(self.others))

    def expanded(self, entries: Iterable[Named]) -> Iterator[Named]:
        """Yields `entries` (records or tags of kept layers), with copies for the removed layers."""
        for keeper, group in itertools.groupby(entries, key=lambda entry: self.keeper(entry.name)):
            run = list(group)
            yield from run
            for path in self.standing_for.get(keeper, ()):
                for entry in run:  # renamed for the removed layer at `path`
                    name = path + entry.name.removeprefix(keeper)
                    moved = dataclasses.replace(entry, name=name, block=self.blocks.position(name))
                    if not isinstance(moved, GemmTag):
                        texts = {key: getattr(moved, key) for key in ("evidence", "nearest")}
                        texts = {key: text.replace(f"{keeper}.", f"{path}.") for key, text in texts.items()}
                        moved = dataclasses.replace(moved, **texts)
                    yield moved

    def others(self, path: str) -> Iterator[str]:
        """Yields the paths in removed layers that correspond to `path` in a kept layer."""
        keeper = self.keeper(path)
        for other in self.standing_for.get(keeper, ()):
            yield other + path.removeprefix(keeper)


LeaveOut = Callable[[nn.Module, Policy], Repeats]
"""Removes foldable layers from a model, in place, and returns the mapping."""


def keep_all(model: nn.Module, _: Policy) -> Repeats:
    """Removes no layer of `model`."""
    return Repeats(blocks=Blocks.from_model(model))


def fold(model: nn.Module, policy: Policy) -> Repeats:
    """Removes from `model`, in place, all layers that an equal layer can stand for."""
    owners = Counter(id(value) for module in model.modules() for value in module._parameters.values())
    blocks = Blocks.from_model(model)
    standing_for: dict[str, tuple[str, ...]] = {}
    pending = [("", model)]
    while pending:
        path, module = pending.pop()
        if isinstance(module, _CONTAINERS):
            standing_for |= _fold_container(path, module, policy, owners, blocks)
        for name, child in module._modules.items():
            inside = joined(path, name)
            if child is not None and inside not in standing_for:
                pending.append((inside, child))
    return Repeats(standing_for=standing_for, blocks=blocks)


def _fold_container(
    path: str, container: nn.Module, policy: Policy, owners: dict[int, int], blocks: Blocks
) -> dict[str, tuple[str, ...]]:
    """Folds one container. Returns the removed paths by the path of the kept layer."""
    kinds: dict[Any, list[str]] = {}
    for index, (name, layer) in enumerate(container._modules.items()):
        if layer is not None:
            at = joined(path, name)
            kind = (repr(tuple(_described(layer, index, owners))), name_signature(policy, layer, at, blocks))
            kinds.setdefault(kind, []).append(name)
    result = {}
    for names in kinds.values():
        if len(names) > 3:
            _, middle, *others, _ = names
            result[joined(path, middle)] = tuple(joined(path, name) for name in others)
            for name in others:
                del container._modules[name]
    return result


def _described(layer: nn.Module, index: int, owners: dict[int, int]) -> Iterator[Any]:
    """Yields every property of `layer`, at `index` of its container, that equality depends on."""
    for name, module in layer.named_modules():
        yield name, type(module).__module__, type(module).__qualname__
        for key, value in (*module._parameters.items(), *module._buffers.items()):
            shared = id(value) if owners.get(id(value), 1) > 1 else 0
            yield key, _tensor(value), shared
        for key, value in sorted(vars(module).items()):
            if key in HOOKS:
                yield key, tuple(_hook(module, number, hook) for number, hook in value.items())
            elif key not in _MODULE_DICTS | HOOK_OPTIONS:
                is_index = type(value) is int and _INDEX.search(key)
                yield key, value - index if is_index else _setting(value)


def _hook(module: nn.Module, number: int, hook: Any) -> Any:
    """Returns a description of a hook, equal for equal hooks.

    number: key of the hook in the module. Bound methods are equal only by key, because objects have state.
    """
    inner = hook.func if isinstance(hook, functools.partial) else hook
    options = tuple(sorted(key for key in HOOK_OPTIONS if number in vars(module).get(key, ())))
    return number if isinstance(inner, MethodType) else _setting(hook), options


def _tensor(value: Tensor | None) -> Any:
    if value is None:
        return None
    layout = repr(getattr(value, "placements", ""))  # layout of a DTensor
    return tuple(value.shape), value.stride(), value.dtype, value.requires_grad, layout


def _setting(value: Any) -> Any:
    """Returns a plain attribute by value, and any other object by its identity or its description."""
    match value:
        case _ if isinstance(value, _PLAIN):
            return value
        case Tensor():
            return _tensor(value)
        case FunctionType() if (value.__module__ or "").startswith(_PARALLEL):
            cells = (cell.cell_contents for cell in value.__closure__ or ())
            return value.__qualname__, tuple(map(_setting, cells))
        case FunctionType():
            return value.__module__, value.__qualname__, id(value.__closure__) if value.__closure__ else 0
        case functools.partial():
            return "partial", _setting(value.func), _setting(value.args), _setting(value.keywords)
        case MethodType():
            return type(value.__self__).__qualname__, _setting(value.__func__)  # also a partial
        case nn.Module():
            return type(value).__qualname__
        case list() | tuple() | set():
            return type(value).__name__, tuple(map(_setting, value))
        case dict():
            return tuple((str(key), _setting(item)) for key, item in value.items())
        case _ if type(value).__module__ == _STYLES:
            return type(value).__qualname__, _setting(vars(value))
        case _ if type(value).__module__.startswith((_PARALLEL, "torch.distributed.device_mesh")):
            return repr(value)  # a mesh or a placement
        case _:
            return type(value).__qualname__, id(value)
