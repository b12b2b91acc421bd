"""Module paths from ``named_modules``, without the segments that wrappers add, and lines of user code.

Nodes have these paths in ``nn_module_stack``: `compiler.capture.locate` replaces Dynamo's paths.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from traceback import walk_tb
from types import FrameType

import torch
from torch import fx, nn

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Attribute names under which compiled, sharded or checkpointed wrappers hold their module."""
PARALLEL = ("DistributedDataParallel", "DataParallel", "AveragedModel")
"""Classes that hold the user's model in the attribute `module`."""
HELD_BYTES = "mx_held_bytes"
"""Attribute of the fake of a parameter that several tensors store: their bytes."""
_ORIGINAL = re.compile(r"(?:\bparametrizations\.([^.]+)\.[^.]+|\bweight_[^.]+)$")
_TORCH = f"{Path(torch.__file__).parent}/"
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)', re.MULTILINE)
_OUTSIDE = _TORCH, f"{Path(sys.modules['mxcompile'].__file__ or '').parent}/"
_USER_CODE = re.compile(r'File "([^"<]+)", line (\d+), in ')


class HeldBy(Enum):
    """Origin of a tensor that is neither a parameter nor a buffer."""

    HELD = auto()  # an attribute, global or closure, or a container in one
    LEAF = auto()  # an argument of the call that accumulates a gradient
    ARGUMENT = auto()  # any other argument of the call


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphInput:
    """One input of a graph.

    path: path of the parameter or buffer in the user's model, or path to an unregistered tensor; "" for data.
    others: further paths of a shared parameter. static: whether it is a parameter or buffer. is_parameter:
    whether it is a parameter. held_bytes: bytes of a parameter that several tensors store, if they are not
    inputs of the graph. unregistered: origin of any other tensor, or None if that is unknown.
    """

    path: str = ""
    others: tuple[str, ...] = ()
    static: bool = False
    is_parameter: bool = False
    held_bytes: int | None = None
    unregistered: HeldBy | None = None

    def inside(self, module_path: str) -> str:
        """Returns the first path below the module at `module_path`, or `path` if no path is below it."""
        return next((p for p in (self.path, *self.others) if p.startswith(f"{module_path}.")), self.path)


def user_path(raw: str) -> str:
    """Returns `raw`, a path of ``named_modules`` or a state dict, without segments of wrappers."""
    return ".".join(step for step in raw.split(".") if step not in WRAPPERS)


def joined(*steps: str) -> str:
    """Returns the non-empty `steps`, joined by dots."""
    return ".".join(step for step in steps if step)


def within(path: str, module_path: str) -> bool:
    """Whether `path` equals `module_path` or lies below it."""
    return not module_path or f"{path}.".startswith(f"{module_path}.")


def enclosing(path: str, paths: Container[str]) -> str:
    """Returns the innermost of `paths` that equals `path` or lies around it, "" if none does."""
    while path and path not in paths:
        path = path.rpartition(".")[0]
    return path


def rebased(path: str, old: str, new: str) -> str:
    """Returns `path` with the prefix `old` replaced by `new`; a path outside of `old` stays."""
    return joined(new, path.removeprefix(old).removeprefix(".")) if within(path, old) else path


def moves(first: Sequence[str], here: Sequence[str]) -> dict[str, str]:
    """Returns the prefixes in which the parameter paths of two calls of one code differ, {old: new}.

    first, here: paths of the first call and of this call; "" is not a parameter. ``0.up.weight`` and
    ``3.up.weight`` give ``0`` → ``3``.
    """
    heads = {}
    for before, now in zip(first, here, strict=True):
        old, new = before.split("."), now.split(".")
        while old and new and old[-1] == new[-1]:
            old.pop()
            new.pop()
        if before and now and old:
            heads[".".join(old)] = ".".join(new)
    return heads


def moved(path: str, heads: Mapping[str, str]) -> str:
    """Returns `path` with its longest prefix among `heads` replaced."""
    head = enclosing(path, heads)
    return joined(heads[head], path[len(head) + 1 :]) if head else path


def module_of(node: fx.Node) -> tuple[str, str]:
    """Returns (path, class name) of the innermost module that `node` was traced in, ("", "") without one."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return "", ""
    path, kind = next(reversed(stack.values()))
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    return path, name.rpartition(".")[2]


def layer_name(module_path: str, parameter_path: str) -> str:
    """Returns the name of a layer from its running module and the parameter that is its weight.

    The name is the path of the parameter's owner within the running module: ``attn.out_proj.weight`` in
    ``attn`` gives ``attn.out_proj``, ``experts.gate_up_proj`` stays, ``attn.in_proj_weight`` gives
    ``attn.in_proj``. For a weight outside the running module (a tied head) it is the module's path.
    """
    inside = not module_path or parameter_path.startswith(f"{module_path}.")
    if not parameter_path or not inside:
        return module_path
    owner, _, attribute = parameter_path.rpartition(".")
    for suffix in ("qdata", "_", "weight", "_"):  # the qdata of a stored weight has the name of the weight
        attribute = attribute.removesuffix(suffix)
    return joined(owner, attribute)


def parametrized(path: str) -> str:
    """Returns the path of the weight that a parametrization computes from the parameter at `path`.

    ``up.parametrizations.weight.original0`` and ``up.weight_v`` give ``up.weight``.
    """
    return _ORIGINAL.sub(lambda match: match[1] or "weight", path)


Owner = tuple[nn.Module, str]
"""A module with a parameter, and the parameter's name there."""


def owners(model: nn.Module) -> dict[str, list[Owner]]:
    """Returns all owners of each parameter of `model`, by each of its paths."""
    by_identity: defaultdict[int, list[tuple[str, Owner]]] = defaultdict(list)
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                by_identity[id(parameter)].append((user_path(joined(prefix, name)), (module, name)))
    return {path: [owner for _, owner in entries] for entries in by_identity.values() for path, _ in entries}


def source_of(node: fx.Node) -> str:
    """Returns ``file:line`` of the innermost code outside torch that created `node`, "" if unknown."""
    trace = node.meta.get("stack_trace")
    frames = _FRAME.findall(trace) if isinstance(trace, str) else []
    outside = [(file, line) for file, line in frames if not file.startswith(_TORCH)]
    return ":".join((outside or frames)[-1]) if frames else ""


def where(frames: Iterable[tuple[FrameType, int]], paths: dict[int, str]) -> tuple[str, str]:
    """Returns (path of the innermost module, ``file:line`` of the innermost user code) in `frames`.

    frames: frames with their lines, the innermost first. paths: module paths of the model, by ``id``.
    """
    path, source = "", ""
    for frame, line in frames:
        if not source and not frame.f_code.co_filename.startswith((*_OUTSIDE, "<")):
            source = f"{frame.f_code.co_filename}:{line}"
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            path = path or paths.get(id(owner), "")
        if path and source:
            break
    return path, source


def where_failed(error: BaseException, model: nn.Module) -> str:
    """Returns `` in PATH (file:line)``, where `model` raised `error`; "" if that is unknown."""
    paths = {id(module): path for path, module in model.named_modules()}
    path, source = where(reversed([*walk_tb(error.__traceback__)]), paths)
    lines = _USER_CODE.findall(str(error))
    if lines:  # Dynamo's message lists the model's frames, which the traceback lacks
        user_lines = [line for line in lines if not line[0].startswith(_OUTSIDE)]
        source = ":".join((user_lines or lines)[-1])
    return "".join((f" in {path}" if path else "", f" ({source})" if source else ""))
