"""Two codes of one graph: the one that runs without a watch, and one that measures, for sampled steps.

    call  →  step sampled?  no: the code            as it is without a watch
                            yes: the second code    the same graph, with the operators of the pass `watch`

Both come from the same captured graph and the same joint passes, and save the same values. The second one is
compiled with the first, without CUDA graphs, for what it delivers is heard by Python. Code that is compiled
for calls without gradients is not watched.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import GlobalStateSource
from torch._guards import Guard, TracingContext

from mxcompile.compiler.capture import Capture
from mxcompile.compiler.compilation import Compilation
from mxcompile.compiler.frames import running
from mxcompile.compiler.options import Options
from mxcompile.compiler.runs import Noted
from mxcompile.models.tree import path_in
from mxcompile.models.wrappers import plain_class
from mxcompile.rules import layers_of
from mxcompile.watch import Watch, calls

log = logging.getLogger(__name__)

Compiled = Callable[..., Any]


def watched(
    code: Compiled,
    compilation: Compilation,
    example_inputs: Sequence[Any],
    compiler: Callable[[Compilation], Compiled],
) -> Compiled:
    """`code` of `compilation`, with a second code for the steps that its options sample.

    compiler: gives the code of the same graph for the compilation that it is given.
    """
    watch = compilation.options.watch
    if watch is None or not _is_watched(compilation, example_inputs):
        return code
    if not watch.every:
        return _Watched(code, code, compilation, watch)
    try:
        sampled = compiler(compilation.measuring(watch))
    except Exception as error:  # training goes on without it
        name = compilation.capture.module or "the model"
        log.warning("watch: %s is not watched: %s: %s", name, type(error).__name__, error)
        return code
    return _Watched(code, sampled, compilation, watch)


def follow(options: Options, capture: Capture) -> Options:
    """`options` as rules of their watch have changed the policy, for the graph of `capture`.

    The code that Dynamo is compiling is guarded: it is compiled again when a rule changes its part of the
    policy. Code that runs for several modules without Dynamo telling them apart does not change.
    """
    watch, context = options.watch, TracingContext.try_get()
    if watch is None or not watch.can_change or context is None or capture.backward:
        return options
    if capture.prefix and capture.owner is None:
        log.warning(
            "watch: rules that put GEMMs into BF16 do nothing in %s, whose code cannot be kept to it; compile"
            " the model with mxcompile.compile(model, watch=…)",
            capture.prefix,
        )
        return options
    paths, prefix, expected = capture.tree.by_identity, capture.prefix, watch.below(capture.prefix)

    def holds(module: object) -> bool:
        return watch.below(next(iter(paths.get(id(module), ())), "") if prefix else "") == expected

    source = capture.owner if capture.prefix else GlobalStateSource()
    context.guards_context.dynamo_guards.add(Guard(source, _install(holds, whole=not capture.prefix)))
    return options.now()


def _install(holds: Callable[[object], bool], *, whole: bool) -> Callable[[Any, Guard], None]:
    """Returns the function that adds a guard to the code: of the frame, or of the module at its source."""

    def rules(builder: Any, guard: Guard) -> None:
        manager = builder.guard_manager.root if whole else builder.get_guard_manager(guard)
        manager.add_lambda_guard(holds, ["mxcompile: rules of a watch"], None)

    return rules


def guard(compilation: Compilation, example_inputs: Sequence[Any]) -> None:
    """Let the code of `compilation`, which is yet to be compiled, tell of NaN and Inf if its options ask."""
    watch = compilation.options.watch
    if watch is not None and watch.nonfinite and _is_watched(compilation, example_inputs):
        compilation.guard(watch)


def _is_watched(compilation: Compilation, example_inputs: Sequence[Any]) -> bool:
    """Whether calls of the code compute gradients, and are not a backward that was captured by itself."""
    if compilation.capture.backward:
        return False
    given = (value for value in example_inputs if isinstance(value, Tensor))
    return torch.is_grad_enabled() and any(value.requires_grad for value in given)


class _Watched:
    """The two codes, called as one."""

    def __init__(self, code: Compiled, sampled: Compiled, compilation: Compilation, watch: Watch) -> None:
        capture = compilation.capture
        self._code = code
        self._sampled = sampled
        self._compiled = capture.prefix
        self._root = None if capture.root is None else weakref.ref(capture.root)
        self._class = None if capture.root is None else plain_class(capture.tree.modules[capture.prefix])
        options, plan = compilation.options, capture.planned.plan
        self._recorder = watch.attach(
            capture.root,
            options.given or options.policy,
            layers_of(compilation.part.gemms) if plan is None else plan.layers,
            target=compilation.target.name,
            torch=torch.__version__,
        )

    def __call__(self, *args: Any) -> Any:
        """Run the code that the step asks for."""
        if not torch.is_grad_enabled():
            return self._code(*args)
        call = self._recorder.begin(self._compiled, self._running, id(self))
        if call is None:
            return self._code(*args)
        if call.is_sampled and isinstance(self._code, Noted):
            self._code.look(args)
        with calls.forward(call):
            results = (self._sampled if call.is_sampled else self._code)(*args)
        if not call.is_repeated:
            calls.follow(call, results)
        return results

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._code, name)  # how torch serializes it

    def _running(self) -> str:
        """The path of the module whose call is going on, among those that run this code."""
        root = self._root() if self._root is not None else None
        if root is None or not self._compiled:
            return self._compiled
        module = next((each for each in running() if plain_class(each) is self._class), None)
        path = path_in(root, module)
        return self._compiled if path is None else path
