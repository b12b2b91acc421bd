"""Runs measuring code in the training steps that a watch samples, and the plain code in all others.

    call  →  step sampled?  no: the plain code       as without a watch
                            yes: the measuring code  the same graph, with the operators of the pass `watch`

Both come from the same captured graph and the same joint passes, and save the same tensors for backward. The
measuring code is compiled together with the plain code, but without CUDA graphs, because its statistics go to
Python callbacks. Calls without gradients are not watched.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext

from mxcompile.compiler.capture.capture import Capture
from mxcompile.compiler.hooks.compilation import Compilation
from mxcompile.compiler.reporting.sharing import add_guard
from mxcompile.compiler.session.frames import running
from mxcompile.compiler.session.options import Options
from mxcompile.compiler.session.session import path_of
from mxcompile.models.tree import Tree
from mxcompile.models.wrappers import plain_class
from mxcompile.rules import layers_of
from mxcompile.watch import Watch, steps

log = logging.getLogger(__name__)

Compiled = Callable[..., Any]


def sampling(
    compilation: Compilation, example_inputs: Sequence[Any], compiler: Callable[[Compilation], Compiled]
) -> Sampling | None:
    """Returns the `Sampling` of `compilation`, or None without a watch.

    compiler: compiles the same graph for another compilation.
    """
    watch = compilation.options.watch
    if watch is None or not _is_watched(compilation, example_inputs):
        return None
    try:
        sampled = compiler(compilation.measuring(watch)) if watch.every else None
    except Exception as error:  # a failing watch must not stop training
        name = compilation.capture.module or "the model"
        log.warning("watch: %s is not watched: %s: %s", name, type(error).__name__, error)
        return None
    return Sampling(sampled, compilation, watch)


def follow(options: Options, capture: Capture) -> Options:
    """Returns `options` with the policy for the next step, as the rules of their watch have changed it.

    Dynamo guards recompile the code when other rules of the policy come into force, and when a rule of the
    watch changes this part of the policy. Code that Dynamo shares between modules without a guard ignores the
    rules of the watch.
    """
    watch, context, policy = options.watch, TracingContext.try_get(), options.policy
    if watch is None or context is None or capture.backward:
        return options
    if policy.has_steps:
        in_force = watch.enter(policy)
        add_guard(
            context, lambda _: policy.in_force(watch.next_step) == in_force, None, "steps of the policy"
        )
    if not watch.can_change:
        return options.now()
    if capture.prefix and not capture.owners:
        log.warning(
            "watch: rules with do: bf16 have no effect in %s, because other modules of its class share its"
            " code; compile the model with mxcompile.compile(model, watch=…)",
            capture.prefix,
        )
        return replace(options, policy=options.policy.at(watch.next_step))
    for source, path in capture.owners if capture.prefix else ((None, ""), *capture.owners):
        add_guard(context, _with_rules_of(watch, path, capture.tree), source, "rules of a watch")
    return options.now()


def _with_rules_of(watch: Watch, owned: str, tree: Tree) -> Callable[[object], bool]:
    """Returns a function: whether the rules of `watch` for a module are those now in force for `owned`."""
    expected = watch.fallbacks.below(owned)

    def holds(module: object) -> bool:
        return watch.fallbacks.below((tree.path_of(module) or "") if owned else "") == expected

    return holds


def guard(compilation: Compilation, example_inputs: Sequence[Any]) -> None:
    """Lets the code of `compilation` report NaN and Inf if its watch requests it; call before compiling."""
    watch = compilation.options.watch
    if watch is not None and watch.nonfinite and _is_watched(compilation, example_inputs):
        compilation.guard(watch)


def _is_watched(compilation: Compilation, example_inputs: Sequence[Any]) -> bool:
    """Whether calls of the code compute gradients. Backward graphs of compiled autograd do not count."""
    if compilation.capture.backward:
        return False
    tensors = (value for value in example_inputs if isinstance(value, Tensor))
    return torch.is_grad_enabled() and any(value.requires_grad for value in tensors)


class Sampling:
    """Runs the code `sampled` in steps that `watch` samples. sampled: None if steps are only counted."""

    def __init__(self, sampled: Compiled | None, compilation: Compilation, watch: Watch) -> None:
        capture = compilation.capture
        self._sampled = sampled
        self._compiled = capture.prefix
        self._root = None if capture.root is None else weakref.ref(capture.root)
        self._class = None if capture.root is None else plain_class(capture.tree.modules[capture.prefix])
        options, plan = compilation.options, capture.planned.plan
        self._recorder = watch.attach(
            capture.root,
            options.user_policy or options.policy,
            layers_of(compilation.part.gemms) if plan is None else plan.layers,
            target=compilation.target.name,
            torch=torch.__version__,
        )

    def run(self, code: Compiled, args: Sequence[Any]) -> Any:
        """Runs the measuring code in a sampled step, else `code`."""
        if not torch.is_grad_enabled():
            return code(*args)
        call = self._recorder.begin(self._compiled, self._running, id(self))
        if call is None:
            return code(*args)
        with steps.forward(call):
            results = (self._sampled or code if call.is_sampled else code)(*args)
        if not call.is_repeated:
            steps.follow(call, results)
        return results

    def _running(self) -> str:
        """Returns the path of the running module among the modules that share this code."""
        root = self._root() if self._root is not None else None
        if root is None or not self._compiled:
            return self._compiled
        module = next((call for call in running() if plain_class(call) is self._class), None)
        path = path_of(root, module)
        return self._compiled if path is None else path
