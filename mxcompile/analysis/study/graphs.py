"""The graphs of a model, processed like in a compile up to code generation, then run node by node.

    Dynamo ─▶ AOTAutograd joint graph ─▶ all passes ─▶ marks ─▶ partitioner ─▶ interpreter

Dynamo keeps the backend object alive, so the object refers to the model weakly.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext

from mxcompile.analysis.study.interpreter import Interpreter, Run
from mxcompile.analysis.study.sites import Sites, mark
from mxcompile.analysis.study.state_guard import SavedState
from mxcompile.compiler.capture.capture import captured
from mxcompile.compiler.hooks.compilation import Compilation
from mxcompile.compiler.session.decompositions import table
from mxcompile.compiler.session.options import Options
from mxcompile.lowering.targets import AUTO, resolve
from mxcompile.report import Part


class Graphs:
    """A Dynamo backend that captures the graphs of `model` and runs them as set by `during`.

    sites: the observable GEMMs and casts. target: target of the graphs.
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        self.sites = Sites()
        self._parts: dict[int, Part] = {}  # of the graphs that ran in the last run, by their number
        self._number = itertools.count()
        self.target = AUTO
        self._model = weakref.ref(model)
        self._options = options
        self._now: tuple[Run, SavedState] | None = None

    @contextmanager
    def during(self, run: Run, kept: SavedState) -> Iterator[None]:
        """Runs the graphs as in `run` in this context. `kept` saves inputs before a graph writes to them."""
        self._now = run, kept
        self._parts.clear()
        try:
            yield
        finally:
            self._now = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts of the report: the graphs of the last run, because a later run may compile code again."""
        return tuple(self._parts.values())

    def _running(self) -> tuple[Run, SavedState]:
        assert self._now is not None
        return self._now

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Takes `gm` through the passes, as Dynamo's backend. Returns the callable."""
        capture = captured(gm, example_inputs, self._model())
        target = resolve(self._options.target, capture.device)
        options = dataclasses.replace(self._options, target=target.name)
        compilation = Compilation(options, capture, gm, target, after=lambda graph: mark(graph, self.sites))
        written: list[int] = []  # indices of the inputs that the graph writes to

        def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
            compilation.run_passes(joint.graph)
            return min_cut_rematerialization_partition(joint, inputs, **options)

        def backward(graph: fx.GraphModule, _: Any) -> Any:
            interpreter = Interpreter(graph, self.sites, lambda: self._running()[0])
            return make_boxed_func(lambda *args: interpreter.run(*args))

        def forward(graph: fx.GraphModule, _: Any) -> Any:
            context = TracingContext.try_get()
            metadata = None if context is None else context.fw_metadata
            inputs = [] if metadata is None else metadata.input_info
            written.extend(index for index, info in enumerate(inputs) if info.mutates_data)
            return backward(graph, _)

        def inference(graph: fx.GraphModule, inputs: Any) -> Any:
            compilation.run_passes(graph.graph)
            return forward(graph, inputs)

        compiled = aot_autograd(
            fw_compiler=forward,
            bw_compiler=backward,
            inference_compiler=inference,
            partition_fn=partition,
            decompositions=table(),
        )(gm, example_inputs)
        self.target = target.name
        part, number = dataclasses.replace(compilation.part, cache="off"), next(self._number)

        def call(*args: Any) -> Any:
            _, kept = self._running()
            self._parts[number] = part
            for index in written:
                kept.add(args[index])
            return compiled(*args)

        return call
