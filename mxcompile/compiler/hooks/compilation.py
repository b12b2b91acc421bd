"""The compile of one graph: the functions of the hooks, and the report's part that they produce."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import fx
from torch._inductor import config, list_mode_options

from mxcompile.compiler.capture.capture import Capture, Gathers
from mxcompile.compiler.capture.locate import name_constants
from mxcompile.compiler.hooks.compiled_autograd import OwnedGemms, mark, marks, token
from mxcompile.compiler.hooks.inductor import (
    GraphModules,
    GraphPass,
    Partitioner,
    settings,
    sources_hash,
    with_needed,
)
from mxcompile.compiler.session.frames import is_broken
from mxcompile.compiler.session.options import Options
from mxcompile.errors import UnsupportedError
from mxcompile.graph.bodies import is_body
from mxcompile.graph.printer import trace_graph
from mxcompile.graph.tags import tags_of
from mxcompile.lowering.graph import pipeline as lowering
from mxcompile.lowering.targets import CPU_FP32, Target
from mxcompile.passes import pipeline as passes
from mxcompile.passes.account import num_casts, saved_bytes, wire_bytes
from mxcompile.passes.compress import Compress
from mxcompile.passes.delayed_scales import histories
from mxcompile.passes.flatten import Flatten
from mxcompile.passes.outline import outline
from mxcompile.passes.record import records
from mxcompile.passes.watch import Site, sites
from mxcompile.passes.watch import Watch as Watching
from mxcompile.passes.weights import weight_bytes
from mxcompile.policy import Gemm
from mxcompile.report import GemmRecord, Part
from mxcompile.rules import layers_of, with_complaints
from mxcompile.watch import Watch


class Compilation:
    """State of one compile. Hooks may run late: backward is lowered after forward has returned.

    count: number of layers that the module at a path stands for. part: report of this graph so far. traced,
    lowered: whether the joint hook and the last hook have run. changed: called when kernel names arrive.
    tapped: whether weights have inputs for delayed scales. after: called with every joint or inference graph
    after the passes. parted: called with the forward and backward of a joint graph.
    """

    def __init__(
        self,
        options: Options,
        capture: Capture,
        gm: fx.GraphModule,
        target: Target,
        count: Callable[[str], int] = lambda _path: 1,
        *,
        tapped: bool = False,
        after: Callable[[fx.Graph], None] = lambda _graph: None,
        parted: Callable[[fx.Graph, fx.Graph], None] = lambda _forward, _backward: None,
    ) -> None:
        self.options = options
        self.capture = capture
        self.target = target
        mode = list_mode_options(options.mode) if options.mode else {}
        self._settings, warnings = with_needed({**mode, **dict(options.inductor)})
        self.part = Part(graph_breaks=int(is_broken(gm)), warnings=warnings)
        self._counted: Counter[str] = Counter()
        self.traced = False
        self.lowered = False
        self.changed: Callable[[], None] = lambda: None
        self._count = count
        self._tapped = tapped
        self._after = after
        self._parted = parted
        self._watch: Watch | None = None
        self._only_nonfinite = False
        self._sites: list[Site] = []
        self._marked: object = None
        self._products = tuple(marks(gm.graph)) if capture.backward else ()
        self.owners = token(self._products)
        self._owned_gemms = OwnedGemms()

    def use_code_of(self, token: str) -> None:
        """Limits cache hits to code with this `token` (see `reporting.entry`). Call it before compiling."""
        self.part = dataclasses.replace(self.part, token=token)

    def complete(self, stored: Part) -> None:
        """Fills in, from the stored part, the results of hooks that a cache hit has skipped."""
        if not self.traced:
            self.part = dataclasses.replace(stored, cache="hit", graph_breaks=self.part.graph_breaks)
            return
        pairs = enumerate(zip(self.part.gemms, stored.gemms, strict=False))
        missing = {index: other.kernel for index, (gemm, other) in pairs if not gemm.kernel}
        if missing:
            self.name_kernels(missing)
            self._update(cache=self.part.cache if self.lowered else "hit")

    @property
    def owner(self) -> Compilation:
        """The compilation that has the report. Compiled autograd's belongs to the forward of its backward."""
        owners = (product.marked.owner for product in self._products if product.marked is not None)
        return next(owners, self)

    def measuring(self, watch: Watch) -> Compilation:
        """Returns a compilation of the same graph that measures the statistics of `watch`."""
        fresh = copy.copy(self)
        fresh.part = Part(token=self.part.token)
        fresh.traced, fresh.lowered, fresh.changed = False, False, lambda: None
        fresh._watch, fresh._only_nonfinite, fresh._sites = watch, False, []
        return fresh

    def guard(self, watch: Watch) -> None:
        """Lets the code report NaN and Inf in the layers of `watch`. Call it before compiling."""
        self._watch, self._only_nonfinite = watch, True

    @functools.cached_property
    def identity(self) -> str:
        """Hash of everything that the hooks and the part depend on."""
        slow_dtypes = sorted(map(str, self.target.slow_dtypes))
        integers = f"{self.target.integers} {self.target.no_integers}"
        target = f"{self.target.name} {slow_dtypes} {integers} {self.target.many_rows} {self.target.few_rows}"
        parts = sources_hash(), self.options.fingerprint(), target, self.capture.identity, settings()
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def __deepcopy__(self, memo: object) -> Compilation:
        """Returns itself, because nested compiles copy Inductor's configuration, which contains it."""
        return self

    def config_patches(self) -> dict[str, Any]:
        """Returns Inductor's configuration for this compile."""
        patches, base = dict(self._settings), f"{self.identity} {self.part.token}"
        if self._watch is not None:
            base = f"{base} watch {self._watch.identity} {self._only_nonfinite}"
            patches["triton.cudagraphs"] = False  # CUDA graphs cannot replay Python callbacks

        def users(key: str) -> Any:
            return patches.get(key, getattr(config, key))

        return {
            **patches,
            "joint_custom_pre_pass": GraphPass(self.run_joint, base, users("joint_custom_pre_pass")),
            "post_grad_custom_pre_pass": GraphPass(self.lower, base, users("post_grad_custom_pre_pass")),
            "custom_partitioner_fn": Partitioner(self.count_saved, base, users("custom_partitioner_fn")),
            **lowering.config_patches(self.target, base, self.name_kernels, patches),
        }

    def run_joint(self, graph: fx.Graph) -> None:
        """Runs the passes and the target's joint lowering on a joint or inference graph.

        Inductor also passes the bodies of control flow operators, which the pass `bodies` has handled
        already.
        """
        if not is_body(graph):
            self.run_passes(graph)
            start = time.perf_counter()
            lowering.run_joint(graph, self.target, self.capture.device)
            self._add(pass_time_us=(time.perf_counter() - start) * 1e6)

    def run_passes(self, graph: fx.Graph) -> None:
        """Runs the passes on a joint or inference graph."""
        if self.capture.backward:  # the passes have run on its joint graph already
            self.traced = True
            self._owned_gemms.set_tags(graph, self._products)
            return
        name_constants(graph, self.capture.tree)
        plan = self.capture.planned.plan
        steps = passes.joint_passes(
            self.options.policy,
            inputs=self.capture.inputs,
            strict=self.options.strict,
            blocks=self.capture.blocks,
            cut=self.capture.cut,
            planned={} if plan is None else plan.by_name,
            tapped=self._tapped,
        )
        trace_graph(graph, "before")
        start = time.perf_counter()
        try:
            passes.run(steps, graph)
        except UnsupportedError as error:
            if self.capture.cut:  # its rules may be for other parts
                raise error from None
            tags = (tag for node in graph.nodes for tag in tags_of(node) if tag.gemm is Gemm.FPROP)
            layers = (*layers_of(self.part.gemms), *(tag.as_layer() for tag in tags))
            raise with_complaints(error, self.options.policy, layers) from None
        trace_graph(graph, "after")
        if self._watch is not None:
            self._sites += sites(graph, self._watch.watches, self._watch.dumps, self._watch.operands)
        # a capture can become several graphs, but its weights are gathered once
        gathers = Gathers() if self.traced else self.capture.gathers
        drawn = outline(graph, self.capture.inputs)
        is_cached = config.fx_graph_cache or config.fx_graph_remote_cache
        self.traced = True
        self._update(cache="miss" if is_cached and not config.force_disable_caches else "off")
        self._add(
            gemms=records(graph),
            outline=drawn,
            pass_time_us=(time.perf_counter() - start) * 1e6,
            weights=weight_bytes(graph, self.capture.inputs, self._count),
            wire_bytes=gathers.forward,
            wire_bytes_bf16=gathers.forward_without,
            histories=histories(graph, len(self.capture.inputs)),
        )
        self._counted = Counter()
        self._count_work(graph)
        self._after(graph)

    def _count_work(self, *graphs: fx.Graph) -> None:
        """Replaces the counts of casts and sent bytes of a joint graph by those in `graphs`."""
        sent, without = zip(*(wire_bytes(graph, self._count) for graph in graphs), strict=True)
        casts = sum(num_casts(graph, self._count) for graph in graphs)
        counted = Counter(casts=casts, wire_bytes=sum(sent), wire_bytes_bf16=sum(without))
        self._add(**{name: number - self._counted[name] for name, number in counted.items()})
        self._counted = counted

    def count_saved(self, graphs: GraphModules, num_forward_outputs: int) -> None:
        """Compresses, counts and flattens the tensors that forward saves for backward."""
        forward, backward = (module.graph for module in graphs)
        changed = Compress(num_outputs=num_forward_outputs, inputs=self.capture.inputs).apply(
            forward, backward
        )
        saved, without = saved_bytes(forward, num_forward_outputs, self._count)
        gathers = self.capture.gathers if self.part.saved_bytes is None else Gathers()
        self._update(
            saved_bytes=(self.part.saved_bytes or 0) + saved,
            saved_bytes_bf16=(self.part.saved_bytes_bf16 or 0) + without,
        )
        self._add(wire_bytes=gathers.backward, wire_bytes_bf16=gathers.backward_without)
        self._count_work(forward, backward)
        self._parted(forward, backward)
        watching = Watching(sites=self._sites, only_nonfinite=self._only_nonfinite)
        changed |= watching.apply(forward, backward)
        changed |= Flatten(num_outputs=num_forward_outputs).apply(forward, backward)
        if changed:
            for module in graphs:
                module.recompile()
        self._marked = mark(backward, self)

    def lower(self, graph: fx.Graph) -> None:
        """Lowers a forward, backward or inference graph for the target."""
        start = time.perf_counter()
        # slow products run in FP32: always on `CPU_FP32`, elsewhere if the policy quantizes
        promotes = self.options.policy.quantizes or self.options.target == CPU_FP32
        lowering.run(graph, self.target, self.capture.device, promotes=promotes)
        self.lowered = True
        self._add(pass_time_us=(time.perf_counter() - start) * 1e6)
        self.name_kernels({tag.index: tag.kernel for node in graph.nodes for tag in tags_of(node)})

    def name_kernels(self, kernels: Mapping[int, str]) -> None:
        """Records the kernels of GEMMs by index, after the lowering and after autotuning."""
        if self.capture.backward:
            self._owned_gemms.name_kernels(kernels)
            return
        gemms = enumerate(self.part.gemms)
        named = (dataclasses.replace(gemm, kernel=kernels.get(index, gemm.kernel)) for index, gemm in gemms)
        self._update(gemms=tuple(named))
        self.changed()

    def add(self, gemms: Iterable[GemmRecord]) -> None:
        """Adds records of products that the passes did not see, unless the part has them from the store."""
        if more := tuple((Counter(gemms) - Counter(self.part.gemms)).elements()):
            self._add(gemms=more)
            self.changed()

    def _add(self, **more: Any) -> None:
        """Adds to numbers and sequences of the part."""
        self._update(**{name: getattr(self.part, name) + value for name, value in more.items()})

    def _update(self, **changes: Any) -> None:
        self.part = dataclasses.replace(self.part, **changes)
