"""Code shared between modules: finds the twins of a module, and guards code against other modules.

Dynamo compiles a frame once for all modules with equal guards. Equal blocks should share the code, but blocks
that the policy treats differently can look equal to Dynamo. The frame therefore gets a guard on the decisions
for its module. If the policy treats all modules of the class equally, no guard is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._dynamo.source import GlobalStateSource
from torch._guards import Guard, Source, TracingContext

from mxcompile.compiler.capture.capture import Capture
from mxcompile.compiler.capture.locate import name_of
from mxcompile.compiler.session.session import session_of
from mxcompile.errors import PolicyError
from mxcompile.graph.tags import Kind
from mxcompile.models.names import rebased, within
from mxcompile.models.wrappers import plain_class
from mxcompile.policy import Policy
from mxcompile.rules import name_signature

Signature = tuple[Any, ...]


def twins(capture: Capture, policy: Policy) -> tuple[tuple[str, tuple[int, int] | None], ...]:
    """Returns (path, block) of the other modules that run the code of the module of `capture`.

    They have the same class and, in the plan, the same layers and decisions.
    """
    if capture.root is None or not capture.prefix or capture.planned.plan is None:
        return ()
    decisions, name = dict(_of_same_class(capture, policy, capture.prefix)), session_of(capture.root).name
    mine = decisions[capture.prefix]
    others = (path for path, other in decisions.items() if other == mine and path != capture.prefix)
    return tuple((path, capture.blocks.position(path)) for path in others if within(path, name))


def guard(capture: Capture, policy: Policy, *, unlimited: bool = False) -> None:
    """Guards the code of `capture` against modules that `policy` treats differently.

    unlimited: whether to raise Dynamo's recompile limit as needed. Raises `PolicyError` if the class needs
    more codes than the limit, or if Dynamo gives no source to guard.
    """
    context = TracingContext.try_get()
    if context is None:
        return
    read = {capture.prefix, *(path for _, path in capture.owners)} - {""}
    decisions = {path: dict(_of_same_class(capture, policy, path)) for path in read}
    for source, path in capture.owners:
        if len({*decisions[path].values()}) > 1:
            _guard_module(context, capture, decisions[path], source, path)
    kinds = {*decisions[capture.prefix].values()} if capture.prefix else set()
    if len(kinds) < 2:
        return
    limit = torch._dynamo.config.recompile_limit
    if unlimited:
        torch._dynamo.config.recompile_limit = max(limit, 4 * len(kinds))  # 4: grad modes × dtypes
    elif len(kinds) > limit:
        name = type(capture.tree.modules[capture.prefix]).__name__
        raise PolicyError(
            f"{policy.label} needs {len(kinds)} compiled versions of class {name}, and Dynamo keeps {limit}"
            f" of one function; compile the model with mxcompile.compile(model, policy=…)"
        )
    if not capture.owners:
        raise PolicyError(
            f"{policy.label} treats {capture.prefix} differently from other modules of its class, but Dynamo"
            " would run its code for all of them; compile the model with mxcompile.compile(model, policy=…)"
        )


def _guard_module(
    context: TracingContext, capture: Capture, decisions: Mapping[str, Signature], source: Source, owned: str
) -> None:
    """Guards the code of `capture`: the module at `source` has the decisions of the module `owned`.

    decisions: the decisions of every module of its class, by path.
    """
    tree, expected = capture.tree, decisions[owned]

    def holds(module: object) -> bool:
        path = tree.path_of(module)
        return path is not None and decisions.get(path) == expected

    add_guard(context, holds, source, f"decisions of {name_of(source)}")


def add_guard(
    context: TracingContext, holds: Callable[[object], bool], source: Source | None, label: str
) -> None:
    """Adds a Dynamo guard that calls `holds` with the object at `source`, or with the frame's locals."""

    def install(builder: Any, guard: Guard) -> None:
        manager = builder.guard_manager.root if source is None else builder.get_guard_manager(guard)
        manager.add_lambda_guard(holds, [f"mxcompile: {label}"], None)

    context.guards_context.dynamo_guards.add(Guard(source or GlobalStateSource(), install))


def _of_same_class(capture: Capture, policy: Policy, owned: str) -> Iterator[tuple[str, Signature]]:
    """Yields (path, decisions) of every module with the class of the module `owned`.

    A compiled function can call several models. A module of another model gets the decisions of the module at
    the same path in this model, if both models have one class and rules select both modules alike.
    """
    modules, root = capture.tree.modules, capture.root
    name = "" if root is None else session_of(root).name
    plan = capture.planned.plan
    by_name = functools.partial(name_signature, policy, blocks=capture.blocks)
    linears = [tag for tag in plan.tags if tag.kind is Kind.LINEAR] if plan is not None else []
    decided = [(tag.name, (tag.n, tag.k), policy.decide(tag.as_layer())) for tag in linears]

    def below(path: str) -> Signature:
        """Returns the decisions below `path`: by the plan, else by name patterns."""
        if plan is None:
            return by_name(modules[path], path)
        return tuple(
            (name.removeprefix(path), *about)
            for name, *about in decided
            if name == path or name.startswith(f"{path}.")
        )

    kind = plain_class(modules[owned])
    for path, module in modules.items():
        if plain_class(module) is not kind:
            continue
        outer = next(other for other in capture.tree.roots if within(path, other))
        counterpart = rebased(path, outer, name)
        if root is None or outer == name:
            yield path, below(path)
        elif (
            plain_class(modules[outer]) is plain_class(root)
            and counterpart in modules
            and by_name(module, path) == by_name(modules[counterpart], counterpart)
        ):
            yield path, below(counterpart)
        else:
            yield path, (outer,)
