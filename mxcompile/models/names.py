"""Module paths as the user knows them: what ``named_modules`` says, without the segments of wrappers.

Graphs have them in ``nn_module_stack``: `compiler.capture.locate` replaces what Dynamo writes there.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

import torch
from torch import fx, nn

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Names under which modules that compile, shard or checkpoint a module hold it."""
PARALLEL = ("DistributedDataParallel", "DataParallel", "AveragedModel")
"""Classes that hold the user's model as `module`."""
_ORIGINAL = re.compile(r"(?:\bparametrizations\.([^.]+)\.[^.]+|\bweight_[^.]+)$")
_TORCH = f"{Path(torch.__file__).parent}/"
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)', re.MULTILINE)


class HeldBy(Enum):
    """Where a tensor comes from that is neither a parameter nor a buffer."""

    HELD = auto()  # an attribute, a global or a closure has it, or a container there
    LEAF = auto()  # the call gives it, and it needs a gradient of its own
    ARGUMENT = auto()  # the call gives it


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphInput:
    """One input of a graph.

    path: of the parameter or buffer in the user's model, or of another tensor by where it is held; "" for
    data. others: further paths of one that modules share. static: whether it is a parameter or buffer.
    is_parameter: whether it is a parameter. unregistered: where any other tensor comes from; None if that is
    not known.
    """

    path: str = ""
    others: tuple[str, ...] = ()
    static: bool = False
    is_parameter: bool = False
    unregistered: HeldBy | None = None

    def inside(self, module_path: str) -> str:
        """The path under which the module at `module_path` has it, if it has."""
        return next((p for p in (self.path, *self.others) if p.startswith(f"{module_path}.")), self.path)


def user_path(raw: str) -> str:
    """The path `raw`, of ``named_modules`` or a state dict, without the segments of wrappers."""
    return ".".join(step for step in raw.split(".") if step not in WRAPPERS)


def joined(*steps: str) -> str:
    """One path of several, those left out that are empty."""
    return ".".join(step for step in steps if step)


def module_of(node: fx.Node) -> tuple[str, str]:
    """Path and class name of the innermost module `node` was traced in; ("", "") outside any."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return "", ""
    path, kind = next(reversed(stack.values()))
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    return path, name.rpartition(".")[2]


def layer_name(module_path: str, parameter_path: str) -> str:
    """The name of a layer, from the module that runs it and the parameter that is its weight.

    The parameter's owner, when the running module contains it: ``attn.out_proj.weight`` run inside
    ``attn`` is ``attn.out_proj``, ``experts.gate_up_proj`` keeps its name, ``attn.in_proj_weight`` is
    ``attn.in_proj``. A weight that lives elsewhere (a tied head) leaves the module's own path.
    """
    inside = not module_path or parameter_path.startswith(f"{module_path}.")
    if not parameter_path or not inside:
        return module_path
    owner, _, attribute = parameter_path.rpartition(".")
    for suffix in ("qdata", "_", "weight", "_"):  # codes stand for the weight that they are of
        attribute = attribute.removesuffix(suffix)
    return joined(owner, attribute)


def parametrized(path: str) -> str:
    """The path of the weight that is computed from the parameter at `path`, by a norm or a parametrization.

    ``up.parametrizations.weight.original0`` and ``up.weight_v`` stand for ``up.weight``.
    """
    return _ORIGINAL.sub(lambda match: match[1] or "weight", path)


Owner = tuple[nn.Module, str]
"""A module that holds a parameter, and under which name."""


def owners(model: nn.Module) -> dict[str, list[Owner]]:
    """Returns all places that hold each parameter of `model`, by the user's path of every place."""
    by_identity: defaultdict[int, list[tuple[str, Owner]]] = defaultdict(list)
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                by_identity[id(parameter)].append((user_path(joined(prefix, name)), (module, name)))
    return {path: [owner for _, owner in held] for held in by_identity.values() for path, _ in held}


def source_of(node: fx.Node) -> str:
    """``file:line`` of the innermost code outside torch that made `node`, "" if unknown."""
    trace = node.meta.get("stack_trace")
    frames = _FRAME.findall(trace) if isinstance(trace, str) else []
    outside = [(file, line) for file, line in frames if not file.startswith(_TORCH)]
    return ":".join((outside or frames)[-1]) if frames else ""
