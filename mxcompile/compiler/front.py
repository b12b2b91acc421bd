"""`mxcompile.compile`: a large or wrapped model, compiled block by block.

    blocks: the members of the model's stacks        equal blocks with equal decisions share one code
    the rest: the modules outside that hold matrices, each by itself
    a model without stacks is one block

Libraries that distribute a model act on modules: FSDP2 gathers a block, DDP waits for its gradients.
Compilation by blocks does not get in their way, and the code of one block serves all equal ones. Roles and
decisions come from the plan of the whole model, which is made when its first block is called.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Never, TypeVar

import torch
from torch import nn

from mxcompile.compiler.backend import Backend
from mxcompile.compiler.reporting.first_call import look_at
from mxcompile.compiler.reporting.unplanned import matrices
from mxcompile.errors import OptionError, not_allowed, shown
from mxcompile.lowering.targets import AUTO
from mxcompile.models.arguments import check_module
from mxcompile.models.names import joined, user_path
from mxcompile.models.tree import Tree
from mxcompile.models.wrappers import plain_class, users_own
from mxcompile.policy import Policy
from mxcompile.watch import Watch

Model = TypeVar("Model", bound=nn.Module)

_STACKS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def compile(  # noqa: A001 - the name of `torch.compile`
    model: Model,
    *,
    policy: Policy | str | Path | Mapping[str, Any] | None = None,
    blocks: str | Sequence[str] = "auto",
    mode: str | None = None,
    report: str | Path | None = None,
    target: str = AUTO,
    strict: bool = False,
    inductor: Mapping[str, Any] | None = None,
    watch: Watch | str | Path | None = None,
    **unknown: Never,
) -> Model:
    """Compile `model` block by block, in place, and return it.

    model: bare, or in any of ``fully_shard``, ``parallelize_module``, ``DistributedDataParallel``; they can
    be applied before or after. policy, report, target, strict, inductor, watch, mode: as for
    ``torch.compile``. blocks: "auto", the members of the model's stacks (module lists, Sequentials); or paths
    of the modules to compile, as globs. Modules outside the blocks that hold matrices (a head) are compiled
    by themselves; a model without stacks is compiled whole.

    The policy is held against the whole model when it is first called, before anything is compiled: there a
    rule that fits no layer is reported, and `strict` raises. After that call a warning, or with `strict` an
    error, tells of layers that ran outside of compiled code, or that nothing was compiled.

    Raises `ModelError`, `OptionError`, `PolicyError` or `TargetError`.
    """
    check_module("compile", model)
    root = users_own(model)
    if any(getattr(module, "_fsdp_use_orig_params", True) is False for module in root.modules()):
        raise OptionError(
            "Dynamo compiles nothing of an FSDP1 model with use_orig_params=False: set it to True"
        )
    chosen = dict(_parts(root, blocks))
    backend = Backend(
        policy=policy,
        report=report,
        target=target,
        strict=strict,
        inductor=inductor,
        watch=watch,
        mode=mode,
        root=root,
        parts=tuple(chosen),
        **unknown,
    )
    for part in chosen.values():
        _compile(part, backend)
    look_at(root, backend.options, chosen)
    return model


def _compile(part: nn.Module, backend: Backend) -> None:
    """``part.compile(backend=backend)``, also for torch's own classes, where Dynamo does not start."""
    if not plain_class(part).__module__.startswith("torch."):
        part.compile(backend=backend)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return part._call_impl(*args, **kwargs)

    part._compiled_call_impl = torch.compile(call, backend=backend)


def _parts(root: nn.Module, blocks: str | Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """The modules of `root` to compile, by the user's path."""
    if blocks == "auto":
        parts = dict(_stacked("", root))
        if not parts and _is_called(root):
            yield "", root
            return
    elif isinstance(blocks, str):
        raise OptionError(not_allowed("blocks", blocks, ["auto"]) + ", or a list of paths")
    else:
        parts = dict(_named(root, blocks))
    yield from parts.items()
    yield from _rest("", root, set(parts))


def _named(root: nn.Module, patterns: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    modules = Tree(root).modules
    for pattern in patterns:
        matching = [path for path in modules if path and fnmatch.fnmatchcase(path, pattern)]
        if not matching:
            raise OptionError(f"blocks: no module of {type(root).__name__} is called {shown(pattern)}")
        yield from ((path, modules[path]) for path in matching)


def _stacked(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The members of stacks, of nested ones the outermost's."""
    if isinstance(module, _STACKS):
        members = {name: child for name, child in _children(module) if any(True for _ in child.children())}
        kinds = Counter(plain_class(users_own(child)) for child in members.values())
        for name, child in members.items():
            if _is_called(child) and kinds[plain_class(users_own(child))] > 1:
                yield joined(path, name), child
            else:
                yield from _stacked(joined(path, name), child)
        return
    for name, child in _children(module):
        yield from _stacked(joined(path, name), child)


def _rest(path: str, module: nn.Module, blocks: set[str]) -> Iterator[tuple[str, nn.Module]]:
    """The largest modules that hold matrices and no block."""
    for name, child in _children(module):
        inside = joined(path, name)
        if inside in blocks:
            continue
        if any(block.startswith(f"{inside}.") for block in blocks) or not _is_called(child):
            yield from _rest(inside, child, blocks)
        elif any(matrices(part) for part in child.modules()):
            yield inside, child


def _is_called(module: nn.Module) -> bool:
    """Whether `module` can be called: one that only holds others, like a list, has no forward."""
    return "forward" in vars(module) or plain_class(module).forward is not nn.Module.forward


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children of `module` under the user's names; what wraps one is the child."""
    for name, child in module._modules.items():
        if child is not None:
            if user_path(name):
                yield name, child
            else:
                yield from _children(child)
