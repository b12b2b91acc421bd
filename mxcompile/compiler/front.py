"""`mxcompile.compile` compiles a large or wrapped model block by block.

    blocks: the members of the model's stacks        equal blocks with equal decisions share code
    the rest: modules with matrices outside the blocks, each compiled separately
    a model without stacks is one block

Libraries for distributed training act on modules: FSDP2 gathers a block, DDP waits for its gradients.
Regional compilation leaves these boundaries intact, and equal blocks share compiled code. Roles and decisions
come from the plan of the whole model, which the first call creates.
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
from mxcompile.compiler.reporting.attempts import check_first_call
from mxcompile.compiler.reporting.unplanned import matrices
from mxcompile.errors import OptionError, nearest, not_allowed, shown
from mxcompile.lowering.targets import AUTO
from mxcompile.models.arguments import check_module
from mxcompile.models.names import joined, user_path
from mxcompile.models.tree import Tree
from mxcompile.models.wrappers import plain_class, user_model
from mxcompile.policy import Policy
from mxcompile.watch import Watch

Model = TypeVar("Model", bound=nn.Module)


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
    """Compiles `model` block by block, in place, and returns it.

    The first call compares the policy with the plan of the whole model before anything is compiled, and logs
    a warning for a rule that matches no layer. After that call it logs a warning for layers that ran outside
    of compiled code. With `strict` such a rule raises `PolicyError`, and such layers `UnsupportedError`.

    Args:
        model: A bare model, or a model in ``fully_shard``, ``parallelize_module`` or
            ``DistributedDataParallel``, which may also be applied afterwards.
        policy: Policy file, preset, dict or `Policy`. Default: the preset ``nvidia``.
        blocks: "auto" for the members of the model's stacks (module lists, Sequentials), or globs of module
            paths. Modules with matrices outside the blocks, such as a head, are compiled separately.
        mode: Mode of Inductor, as in ``torch.compile(mode=…)``.
        report: File of the report. Its suffix selects the form.
        target: Name of a target or a chip. Default: the device of the inputs.
        strict: Whether to raise instead of a fallback to BF16, and for policy rules without effect.
        inductor: Overrides of ``torch._inductor.config``.
        watch: `Watch`, file for its records, or ``"nonfinite"``.
        **unknown: Not allowed; the error names the nearest option.

    Returns:
        `model` itself.

    Raises:
        ModelError: `model` is not an `nn.Module`.
        OptionError: An option is invalid, no module matches `blocks`, or FSDP1 has ``use_orig_params=False``.
        PolicyError: The policy is invalid.
        TargetError: The target is unknown.

    Examples:
        >>> model = mxcompile.compile(model, policy="ocp", report="report.html")
    """
    check_module("compile", model, may_be_lazy=True)
    root = user_model(model)
    if any(getattr(module, "_fsdp_use_orig_params", True) is False for module in root.modules()):
        raise OptionError(
            "Dynamo does not compile an FSDP1 model with use_orig_params=False: set use_orig_params=True"
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
    check_first_call(root, backend.options, chosen)
    return model


def _compile(part: nn.Module, backend: Backend) -> None:
    """Calls ``part.compile(backend=backend)``.

    Dynamo skips code in torch's files. A module of a torch class is called by a function of this file.
    """
    if not plain_class(part).__module__.startswith("torch."):
        part.compile(backend=backend)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return part._call_impl(*args, **kwargs)

    part._compiled_call_impl = torch.compile(call, backend=backend)


def _parts(root: nn.Module, blocks: str | Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yields (path, module) for every module of `root` to compile."""
    if blocks == "auto":
        parts = dict(_stacked("", root))
        if not parts and _is_called(root):
            yield "", root
            return
    elif isinstance(blocks, str):
        raise OptionError(not_allowed("blocks", blocks, ["auto"]) + ", or a list of paths")
    else:
        parts, modules = {}, Tree({"": root}).modules
        for pattern in blocks:
            matching = [path for path in modules if path and fnmatch.fnmatchcase(path, pattern)]
            if not matching:
                raise OptionError(
                    f"blocks: no module of {type(root).__name__} has the path {shown(pattern)}"
                    f"{nearest(pattern, modules)}"
                )
            parts |= {path: modules[path] for path in matching}
    yield from parts.items()
    yield from _rest("", root, set(parts))


def _stacked(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the members of stacks. Only the outermost of nested stacks counts."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        members = {name: child for name, child in _children(module) if any(True for _ in child.children())}
        kinds = Counter(plain_class(user_model(child)) for child in members.values())
        for name, child in members.items():
            if _is_called(child) and kinds[plain_class(user_model(child))] > 1:
                yield joined(path, name), child
            else:
                yield from _stacked(joined(path, name), child)
        return
    for name, child in _children(module):
        yield from _stacked(joined(path, name), child)


def _rest(path: str, module: nn.Module, blocks: set[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yields the largest modules that contain matrices but no block."""
    for name, child in _children(module):
        inside = joined(path, name)
        if inside in blocks:
            continue
        if any(block.startswith(f"{inside}.") for block in blocks) or not _is_called(child):
            yield from _rest(inside, child, blocks)
        elif any(matrices(part) for part in child.modules()):
            yield inside, child


def _is_called(module: nn.Module) -> bool:
    """Whether `module` has a forward. Containers such as module lists have none."""
    return "forward" in vars(module) or plain_class(module).forward is not nn.Module.forward


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the children of `module` under the user's names, with their wrappers."""
    for name, child in module._modules.items():
        if child is not None:
            if user_path(name):
                yield name, child
            else:
                yield from _children(child)
