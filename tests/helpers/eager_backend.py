"""A Dynamo backend that runs the passes but not Inductor: the rewritten graphs are executed node by node.

The mx operators run their reference implementations, and every intermediate has the dtype the graph says, so
what differs from an eager model is what the passes did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

import mxcompile.compiler.backend  # noqa: F401  watches what Dynamo leaves to Python
from mxcompile.compiler.calls import delayed_scales
from mxcompile.compiler.calls.compiled_graph import CompiledGraph, weak_references
from mxcompile.compiler.calls.delayed_scales import DelayedScales
from mxcompile.compiler.calls.hidden_products import hidden_products
from mxcompile.compiler.calls.sampling import follow, guard, sampling
from mxcompile.compiler.capture.capture import captured
from mxcompile.compiler.capture.prepare import copied
from mxcompile.compiler.hooks.compilation import Compilation
from mxcompile.compiler.reporting import sharing
from mxcompile.compiler.reporting.checks import check_plan
from mxcompile.compiler.reporting.entry import publish
from mxcompile.compiler.session.decompositions import table
from mxcompile.compiler.session.options import Options
from mxcompile.compiler.session.session import session_of
from mxcompile.graph.printer import print_ir
from mxcompile.lowering.targets import TARGETS
from mxcompile.models.wrappers import user_model


def node_by_node(run: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """AOTAutograd whose graphs go to `run`."""
    how = {"inference_compiler": run, "partition_fn": min_cut_rematerialization_partition, **how}
    return aot_autograd(fw_compiler=run, bw_compiler=run, keep_inference_input_mutations=True, **how)


class EagerBackend:
    """Options as for the real backend.

    before: called with every joint or inference graph before the passes. ir: those graphs as text, after
    them. root: the model, for a part of it. lowers: whether copies of the graphs that run are lowered, which
    names kernels. graphs: the forward, backward and inference graphs that ran.
    """

    __name__ = "mxfp8"  # as `mxcompile.Backend` has it

    def __init__(
        self,
        before: Callable[[fx.Graph], None] | None = None,
        root: Any = None,
        parts: Any = None,
        mode: Any = None,
        lowers: bool = False,
        **options: Any,
    ) -> None:
        self.lowers = lowers
        self.parts = parts
        self.root = root
        self.options = Options.parse(None, options)
        self.before = before
        self.ir: list[str] = []
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        graph = captured(gm, example_inputs, self.root)
        options = follow(self.options, graph)
        if graph.root is not None:
            session_of(user_model(graph.root)).policies[options.group] = options.policy
        tapped = delayed_scales.tap(gm, example_inputs, graph, options.policy)
        compilation = Compilation(
            options, graph, gm, TARGETS["cpu"], tapped=delayed_scales.needed(options.policy)
        )
        if tapped is not None:
            gm, example_inputs = tapped.gm, [*example_inputs, *tapped.states]
        check_plan(compilation, self.parts)
        sharing.guard(graph, options.policy, unlimited=self.parts is not None)

        guard(compilation, example_inputs)
        return CompiledGraph(
            self._compiled(gm, example_inputs, compilation),
            attribution=publish(compilation, None),
            sampling=sampling(
                compilation,
                example_inputs,
                lambda sampled: self._compiled(copied(gm), example_inputs, sampled),
            ),
            scales=DelayedScales(tapped, dict(compilation.part.histories), graph) if tapped else None,
            references=weak_references(),
            hidden=hidden_products(compilation, gm),
        )

    def _compiled(self, gm: fx.GraphModule, example_inputs: Sequence[Any], compilation: Compilation) -> Any:
        def passes(graph: fx.GraphModule) -> None:
            if self.before is not None:
                self.before(graph.graph)
            compilation.run_passes(graph.graph)
            self.ir.append(print_ir(graph.graph))

        def partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
            passes(joint)
            graphs = min_cut_rematerialization_partition(joint, inputs, **kwargs)
            compilation.count_saved(graphs, kwargs["num_fwd_outputs"])
            return graphs

        def run(graph: fx.GraphModule, _: Any) -> Any:
            graph.recompile()
            if self.lowers:
                compilation.lower(copied(graph).graph)
            self.graphs.append(graph)
            return make_boxed_func(graph.forward)

        def inference(graph: fx.GraphModule, inputs: Any) -> Any:
            passes(graph)
            return run(graph, inputs)

        how = {"inference_compiler": inference, "partition_fn": partition, "decompositions": table()}
        return node_by_node(run, **how)(gm, example_inputs)
