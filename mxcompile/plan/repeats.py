"""Equal layers of a model, of which a few stand for all when the model is only traced.

Layers are the members of a module list. Two are equal if they have the same classes, settings, parameters
(shape, dtype, gradient, layout on a mesh) and buffers throughout, but for their own index, and if the
policy's names and blocks fall on them alike. Of every kind the first, one in the middle and the last are
kept; the one in the middle stands for the rest: ends can differ in what surrounds them, the middle cannot.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mxcompile.graph.tags import GemmTag
from mxcompile.models.blocks import Blocks
from mxcompile.models.names import joined
from mxcompile.models.wrappers import HOOK_OPTIONS, HOOKS
from mxcompile.policy import Policy
from mxcompile.report import GemmRecord, Part
from mxcompile.rules import name_signature

Named = TypeVar("Named", GemmRecord, GemmTag)

_INDEX = re.compile(r"(idx|index|layer_id|layer_num(ber)?|block_id|block_num(ber)?)$")
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_OWN = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_PARALLEL = "torch.distributed.tensor"
_STYLES = f"{_PARALLEL}.parallel.style"
_PLAIN = (int, float, complex, str, bytes, bool, type(None), type, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeats:
    """Which layers stand for which: module path of a kept layer to the paths of those left out.

    blocks: of the model with all its layers.
    """

    standing_for: dict[str, tuple[str, ...]] = field(default_factory=dict)
    blocks: Blocks = field(default_factory=Blocks)

    def keeper(self, path: str) -> str | None:
        """The kept layer that `path` lies in, if it stands for others."""
        steps = path.split(".")
        heads = (".".join(steps[:end]) for end in range(1, len(steps) + 1))
        return next((head for head in heads if head in self.standing_for), None)

    def count(self, path: str) -> int:
        """How many layers the module at `path` stands for, itself included."""
        keeper = self.keeper(path)
        return 1 if keeper is None else 1 + len(self.standing_for[keeper])

    def expand(self, part: Part) -> Part:
        """`part`, of a graph with the kept layers, with a record for every layer."""
        gemms = tuple(self.expanded(part.gemms))
        return dataclasses.replace(part, gemms=gemms, outline=part.outline.widened(self.others))

    def expanded(self, entries: Iterable[Named]) -> Iterator[Named]:
        """`entries`, records or tags of the kept layers in order, with one for every layer."""
        for keeper, group in itertools.groupby(entries, key=lambda one: self.keeper(one.name)):
            run = list(group)
            yield from run
            for path in self.standing_for[keeper] if keeper is not None else ():
                for one in run:
                    yield self._moved(one, str(keeper), path)

    def _moved(self, one: Named, keeper: str, path: str) -> Named:
        """Returns `one`, of the layer at `keeper`, for the layer at `path`."""
        name = path + one.name.removeprefix(keeper)
        moved = dataclasses.replace(one, name=name, block=self.blocks.place(name))
        if isinstance(moved, GemmTag):
            return moved
        changes = {
            key: getattr(moved, key).replace(f"{keeper}.", f"{path}.") for key in ("evidence", "nearest")
        }
        return dataclasses.replace(moved, **changes)

    def others(self, path: str) -> Iterator[str]:
        """The paths that what is at `path` stands for, without its own."""
        keeper = self.keeper(path)
        if keeper is not None:
            for other in self.standing_for[keeper]:
                yield other + path.removeprefix(keeper)


LeaveOut = Callable[[nn.Module, Policy], Repeats]
"""Takes layers from a model, in place, that others can stand for under a policy."""


def keep_all(model: nn.Module, _: Policy) -> Repeats:
    """Take nothing from `model`: every layer stands for itself."""
    return Repeats(blocks=Blocks.of(model))


def fold(model: nn.Module, policy: Policy) -> Repeats:
    """Take from `model`, in place, the layers that others can stand for."""
    owners: defaultdict[int, int] = defaultdict(int)
    for module in model.modules():
        for parameter in module._parameters.values():
            owners[id(parameter)] += 1
    blocks = Blocks.of(model)
    standing_for: dict[str, tuple[str, ...]] = {}
    pending = [("", model)]
    while pending:
        path, module = pending.pop()
        if isinstance(module, _CONTAINERS):
            standing_for |= _fold_container(model, path, module, policy, owners, blocks)
        for name, child in module._modules.items():
            inside = joined(path, name)
            if child is not None and inside not in standing_for:
                pending.append((inside, child))
    return Repeats(standing_for=standing_for, blocks=blocks)


def _fold_container(
    model: nn.Module,
    path: str,
    container: nn.Module,
    policy: Policy,
    owners: dict[int, int],
    blocks: Blocks,
) -> dict[str, tuple[str, ...]]:
    """Fold one container; for each kept layer that stands for others, their paths."""
    kinds: dict[Any, list[str]] = {}
    for index, (name, layer) in enumerate(container._modules.items()):
        if layer is not None:
            own = joined(path, name)
            kind = (repr(tuple(_described(layer, index, owners))), name_signature(policy, layer, own, blocks))
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
    """Everything that can tell `layer`, number `index` of its container, from another."""
    for name, module in layer.named_modules():
        yield name, type(module).__module__, type(module).__qualname__
        for key, value in (*module._parameters.items(), *module._buffers.items()):
            shared = id(value) if owners.get(id(value), 1) > 1 else 0
            yield key, _tensor(value), shared
        for key, value in sorted(vars(module).items()):
            if key in HOOKS:
                yield key, tuple(_hook(module, number, hook) for number, hook in value.items())
            elif key not in _OWN | HOOK_OPTIONS:
                yield key, value - index if _is_index(key, value) else _setting(value)


def _hook(module: nn.Module, number: int, hook: Any) -> Any:
    """A hook of `module` by what it does; a method, which may do anything with its object, by its number."""
    inner = hook.func if isinstance(hook, functools.partial) else hook
    options = tuple(sorted(key for key in HOOK_OPTIONS if number in vars(module).get(key, ())))
    return number if isinstance(inner, MethodType) else _setting(hook), options


def _is_index(key: str, value: Any) -> bool:
    return type(value) is int and bool(_INDEX.search(key))


def _tensor(value: Tensor | None) -> Any:
    if value is None:
        return None
    layout = repr(getattr(value, "placements", ""))  # of a DTensor
    return tuple(value.shape), value.stride(), value.dtype, value.requires_grad, layout


def _setting(value: Any) -> Any:
    """A plain attribute by value, anything else by what it is shared with."""
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
            return type(value.__self__).__qualname__, value.__func__.__qualname__
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
