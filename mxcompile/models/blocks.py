"""The repeated blocks of a model, and the block of each layer.

A stack is a module list, a Sequential or a numbered module dict with repeated composite modules of a class.
Its blocks are its composite members in order. In a Sequential only repeated classes count, because it may
begin with a stem and end with a head. Of nested stacks the outer stack counts: an expert belongs to the block
of its layer. A stage (a member with its own stack, whose width differs from other stages) is not a block; the
stack inside each stage counts instead. Blocks in separate attributes (``block1``, ``block2``) are not found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from mxcompile.models.names import PARALLEL, enclosing, joined, user_path
from mxcompile.policy import Block

_Named = tuple[str, nn.Module]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Index and count of every block of a model, by the block's path."""

    places: Mapping[str, Block] = field(default_factory=dict)

    @classmethod
    def from_model(cls, root: nn.Module) -> Blocks:
        """Returns the blocks of `root`."""
        return cls.from_models({"": root})

    @classmethod
    def from_models(cls, models: Mapping[str, nn.Module]) -> Blocks:
        """Returns the blocks of all `models`, whose keys are their paths."""
        places: dict[str, Block] = {}
        pending = [*models.items()]
        while pending:
            path, module = pending.pop()
            blocks = _blocks(module)
            for index, (name, _) in enumerate(blocks):
                places[joined(path, name)] = Block(index, len(blocks))
            names = {name for name, _ in blocks}
            pending += [(joined(path, name), child) for name, child in _children(module) if name not in names]
        return cls(places)

    def position(self, name: str) -> Block | None:
        """Returns the block of the layer `name`, or None if it is outside all blocks."""
        return self.places.get(enclosing(name, self.places))


def _children(module: nn.Module) -> Iterator[_Named]:
    """Yields (name, child) with the user's names; the child of a wrapper has the name ""."""
    for name, child in module.named_children():
        wrapped = not user_path(name) or (name == "module" and type(module).__name__ in PARALLEL)
        yield ("" if wrapped else name), child


def _unwrapped(module: nn.Module) -> nn.Module:
    inside = dict(_children(module)).get("")
    return module if inside is None else _unwrapped(inside)


def _blocks(module: nn.Module) -> list[_Named]:
    """Returns the blocks of `module` if it is a stack, else an empty list."""
    if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return []
    if isinstance(module, nn.ModuleDict) and not all(name[-1:].isdecimal() for name in module):
        return []
    members = []
    for name, child in _children(module):
        member = _unwrapped(child)  # it counts if it has several matrices, or children with parameters
        matrices = sum(parameter.ndim > 1 for parameter in member.parameters(recurse=False))
        if matrices > 1 or (any(True for _ in member.children()) and any(True for _ in member.parameters())):
            members.append((name, member))
    kinds = Counter(type(member) for _, member in members)
    if isinstance(module, nn.Sequential):
        members = [(name, member) for name, member in members if kinds[type(member)] > 1]
    elif len(members) > 1 and max(kinds.values()) == 1:
        return []
    return [] if _are_stages([member for _, member in members]) else members


def _are_stages(members: list[nn.Module]) -> bool:
    """Whether `members` differ in width and contain stacks."""
    first: dict[type[nn.Module], dict[str, object]] = {}
    for member in members:
        shapes: dict[str, object] = {name: tuple(p.shape) for name, p in member.named_parameters()}
        expected = first.setdefault(type(member), shapes)
        if any(expected.get(name, shape) != shape for name, shape in shapes.items()):
            return any(_blocks(inner) for stage in members for inner in stage.modules())
    return False
