"""Runs Inductor's GPU path without a GPU: from a model to the generated source.

    model on fake CPU tensors ─ Dynamo ─ AOTAutograd ─▶ joint graph ─▶ moved to the target's device
        ─ passes ─ partitioner ─▶ forward, backward ─ Inductor: lowering, scheduling, code ─▶ source

Hooks, passes and lowering are the same as in a compile (see `compilation`). The generated module is not
loaded; only its source is kept.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._inductor import debug
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.fx_passes.joint_graph import constant_fold_uniform_value
from torch._inductor.fx_passes.post_grad import remove_noop_ops
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode

from mxcompile.compiler.calls import delayed_scales
from mxcompile.compiler.capture.capture import Capture
from mxcompile.compiler.rehearsal import Rehearsal, Unused, trace
from mxcompile.compiler.session.options import Options
from mxcompile.graph.attention import ATTENTIONS
from mxcompile.graph.opsets import called_packet
from mxcompile.graph.tags import GemmTag, bytes_of, tags_of
from mxcompile.models.fake_copy import checkpointed_copy
from mxcompile.models.value_tracking_mode import ValueTrackingMode
from mxcompile.offline.device import attention_flops, move
from mxcompile.offline.standin import DEVICE, stand_in
from mxcompile.ops.view import call_of
from mxcompile.ranks.built import rank_copy
from mxcompile.ranks.fsdp import FSDPGroup
from mxcompile.report import Part

_CONFIG: dict[str, Any] = {
    "force_disable_caches": True,
    "compile_threads": 1,
    "cpp_wrapper": False,
    "benchmark_kernel": False,
    "trace.provenance_tracking_level": 1,
    "max_autotune": False,  # timing needs the GPU
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "shape_padding": False,  # Inductor pads BF16 products by timing them
    "joint_graph_constant_folding": False,
    "triton.cudagraphs": False,
    "triton.autotune_at_compile_time": False,
    "triton.unique_kernel_names": True,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """The code that Inductor generated for one graph.

    phase: "forward", "backward" or "inference". source: the Python module. input_bytes: bytes of the graph's
    inputs by their names in the module. origins: names of the graph nodes that a kernel computes, by
    ``name:number`` in the order of code generation. gemms: tags by node name. operators: operator by node
    name. attention_flops: FLOPs of attention nodes by name.
    """

    phase: str
    source: str
    input_bytes: dict[str, int]
    origins: dict[str, tuple[str, ...]]
    gemms: dict[str, tuple[GemmTag, ...]]
    operators: dict[str, str]
    attention_flops: dict[str, float]


class Driver(Rehearsal[FakeTensorMode]):
    """The rehearsal that generates the code for one target.

    parts: parts of the report. generated: code by graph, forward before backward.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        training: bool,
        attention: str,
        sharded: tuple[FSDPGroup, ...] | None = None,
    ) -> None:
        """sharded: the FSDP2 groups of a model on a rank of a mesh; None without a mesh."""
        mode, copied = FakeTensorMode(allow_non_fake_inputs=True), checkpointed_copy
        if sharded is not None:
            mode, copied = ValueTrackingMode(), partial(rank_copy, sharded)
        super().__init__(model, options, mode, training=training, copied=copied)
        self._attention = attention
        self.parts: list[Part] = []
        self.generated: list[Generated] = []

    def graph(
        self, capture: Capture, gm: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Generates the code of a captured graph. Returns its eager forward, which yields fake results."""
        policy = self.options.policy
        tapped = delayed_scales.tap(gm, example_inputs, capture, policy)
        capture = dataclasses.replace(capture, device=DEVICE)
        compilation = self.compilation(capture, gm, tapped=delayed_scales.needed(policy))
        if self.options.watch is not None:
            compilation = compilation.measuring(self.options.watch)
        graph, inputs = gm, list(example_inputs)
        if tapped is not None:
            with self.mode:
                states = [torch.zeros(3, requires_grad=state.requires_grad) for state in tapped.states]
            graph, inputs = tapped.gm, [*inputs, *states]
        # a GPU's random states can be inputs of a graph, which takes a generator of this GPU
        states = functorch_config.patch(graphsafe_rng_functionalization=False)
        with stand_in(self.target), states, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # about this machine
            trace(compilation, graph, inputs, self._generate, _CONFIG)
        self.parts.append(compilation.part)
        return gm.forward

    def after(self, capture: Capture, graph: fx.Graph) -> None:
        """Folds constants as Inductor does, which needs CPU values, then moves the graph to the GPU."""
        remove_noop_ops(graph)
        if graph.owning_module is not None:
            constant_fold_uniform_value(graph.owning_module)
        move(graph, DEVICE, self._attention)

    def _generate(self, gm: fx.GraphModule, _: Any, **options: Any) -> Any:
        """Replaces Inductor's inner compiler: runs it and keeps the generated source without loading it."""
        inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
        phase = "backward" if options.get("is_backward") else "forward"
        phase = "inference" if options.get("is_inference") else phase

        def keep(lowered: GraphLowering) -> Any:
            source, _ = lowered.codegen()
            self.generated.append(_generated(phase, lowered, source.value))
            return SimpleNamespace(call=Unused(), __file__=__file__)

        with mock.patch.object(GraphLowering, "compile_to_module", keep), torch.no_grad():
            compile_fx_inner(gm, inputs, **options)
        return Unused()


def _generated(phase: str, lowered: GraphLowering, source: str) -> Generated:
    nodes = lowered.graph.nodes
    values = {node.name: node.meta.get("val") for node in nodes if node.op == "placeholder"}
    attentions = [node for node in nodes if called_packet(node) in ATTENTIONS]
    return Generated(
        phase=phase,
        source=source,
        input_bytes={name: bytes_of(value) for name, value in values.items()},
        origins={
            name: tuple(node_names)
            for name, node_names in debug._inductor_triton_kernel_to_post_grad_node_info.items()
        },
        gemms={node.name: tags_of(node) for node in nodes if tags_of(node)},
        operators={node.name: str(call_of(node)[0]) for node in nodes if node.op == "call_function"},
        attention_flops={node.name: attention_flops(node) for node in attentions},
    )
