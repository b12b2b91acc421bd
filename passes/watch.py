"""watch: measure errors of casts in the graphs of a sampled step; other steps may detect NaN and Inf.

    q, s = quantize(x)   →   q, s = quantize(x)
                             measured = cast_statistics(x)   …   deliver([measured, …], sites)

                         bad = nonfinite(s)              …   deliver([bad, …], sites)      for every step

`sites` lists the casts of a joint graph with the operands that read them, and the results of products, y and
dw, which are not cast. `Watch` adds its operators after the partitioner, so that the same values are saved
with and without them; it measures a source in the graph that computes it. No other operator reads the
results, and a cast reads its source from memory either way, so losses and gradients stay bit-identical.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from torch import fx

from mxcompile import ops
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import packet
from mxcompile.graph.reshapes import producing_call
from mxcompile.graph.tags import GemmTag, tagged, value_of
from mxcompile.ops.view import Cast, Product, results_of
from mxcompile.policy import Gemm

MAX_COMPARED = 1 << 16
"""Number of elements of a weight's cast that are compared from sample to sample."""

DUMPED = 1 << 16
"""Number of elements of an operand that are kept for a rule that writes them to a file."""

RESULTS = {Gemm.FPROP: "y", Gemm.WGRAD: "dw"}
"""Names of the results of products."""

OPERANDS = ("x", "w", "dy", *RESULTS.values())
"""Names of the operands and results of products that can be watched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """An operand or result of a product. operand: a name of `OPERANDS`."""

    layer: str
    gemm: str
    operand: str
    role: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A cast or a result of a product that is to be measured.

    source, seed, scale: names of nodes that the cast reads, or "". scales: name of the cast's scales, "" if
    they are delayed. dim: contraction dimension. fmt: name of the format, "" for a result. sizes: sizes of
    the source if an excerpt is kept, else empty. missing: reason why it cannot be measured, or "".
    """

    readers: tuple[Reader, ...]
    source: str = ""
    dim: int = -1
    fmt: str = ""
    seed: str = ""
    stream: int = 0
    scale: str = ""
    scales: str = ""
    sizes: tuple[int, ...] = ()
    missing: str = ""

    @property
    def is_weight(self) -> bool:
        """Whether a product reads it as the weight."""
        return any(reader.operand == "w" for reader in self.readers)

    @property
    def description(self) -> str:
        """The description that `deliver` passes on, as JSON."""
        readers = [asdict(reader) for reader in self.readers]
        about = {"format": self.fmt, "dim": self.dim, "sizes": self.sizes, "missing": self.missing}
        return json.dumps({"readers": readers, **about})


def sites(
    graph: fx.Graph,
    watched: Callable[[str], bool],
    dumped: Callable[[Reader], bool] = lambda _: False,
    operands: Container[str] = OPERANDS[:3],
) -> list[Site]:
    """Returns the casts of the joint graph `graph`, after all passes, for layers with a `watched` name.

    dumped: whether to keep an excerpt of an operand. operands: names of `OPERANDS` to include.
    """
    casts: dict[fx.Node, list[Reader]] = {}
    missing: list[Site] = []
    for tag, operand, cast in _operands(graph):
        if operand not in operands or not watched(tag.name):
            continue
        reader = Reader(layer=tag.name, gemm=str(tag.gemm), operand=operand, role=str(tag.role))
        if cast is None:
            missing.append(Site(readers=(reader,), missing="it is stored or gathered in a quantized format"))
        else:
            casts.setdefault(cast, []).append(reader)
    measured = (_site(cast, readers, any(map(dumped, readers))) for cast, readers in casts.items())
    return [*measured, *missing]


def _operands(graph: fx.Graph) -> Iterator[tuple[GemmTag, str, fx.Node | None]]:
    for node, tag in tagged(graph):
        if packet(node) in ops.PRODUCTS:
            for operand, (qdata, _) in zip(tag.tensors, Product.read(node).sides, strict=True):
                cast, _ = producing_call(qdata)
                yield tag, operand, cast if Cast.from_node(cast) is not None else None
            if tag.gemm in RESULTS:
                yield tag, RESULTS[tag.gemm], node


def _site(cast: fx.Node, readers: Sequence[Reader], is_dumped: bool) -> Site:
    distinct = tuple(dict.fromkeys(readers))
    if packet(cast) in ops.PRODUCTS:
        return Site(readers=distinct, source=cast.name)
    scales = next((result.name for index, result in results_of(cast) if index == 1), "")
    view = Cast.read(cast)
    seed, scale = (node.name if node is not None else "" for node in (view.seed, view.scale))
    sizes = tuple(value_of(view.x).shape)
    return Site(
        readers=distinct,
        source=view.x.name,
        dim=view.side,
        fmt=str(view.form),
        seed=seed,
        stream=view.stream,
        scale=scale,
        scales="" if view.form.amax.stateful else scales,
        sizes=sizes if is_dumped and all(isinstance(size, int) for size in sizes) else (),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """Inserts operators that measure `sites` of the joint graph. only_nonfinite: only count NaN and Inf."""

    name: ClassVar[str] = "watch"
    sites: Sequence[Site] = field(default_factory=list)
    only_nonfinite: bool = False

    def apply(self, forward: fx.Graph, backward: fx.Graph) -> bool:
        """Adds measurements to both graphs. Returns whether it added any."""
        writers = _Writer(forward), _Writer(backward)
        for site in self.sites:
            if self.only_nonfinite:
                if not any(
                    writer.guard(name, site) for name in (site.scales, site.source) for writer in writers
                ):
                    writers[0].skipped.append(site.description)
            elif not any(writer.measure(site) for writer in writers):
                reason = site.missing or "its source is in neither graph"
                writers[0].skipped.append(Site(readers=site.readers, missing=reason).description)
        added = [writer.deliver() for writer in writers]
        return any(added)


class _Writer:
    """Adds measurements to one graph. skipped: descriptions of sites that are not measured."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._build = Builder(graph, Watch.name)
        self._nodes = {node.name: node for node in graph.nodes}
        self._results: list[fx.Node] = []
        self._measured: list[str] = []
        self.skipped: list[str] = []

    def measure(self, site: Site) -> bool:
        """Measures the cast of `site` if this graph has the cast's inputs. Returns whether it measured."""
        needed = [name for name in (site.source, site.seed, site.scale) if name]
        if not needed or not all(name in self._nodes for name in needed):
            return False
        source, seed, scale = (self._nodes.get(name) for name in (site.source, site.seed, site.scale))
        assert source is not None
        last = max(self._nodes[name] for name in needed)
        sizes, compared = value_of(source).shape, 0
        if site.is_weight and all(isinstance(size, int) for size in sizes):
            compared = min(MAX_COMPARED, int(sizes.numel()))
        arguments = source, site.dim, site.fmt, compared, seed, site.stream, scale
        results = self._called(last, ops.cast_statistics, *arguments)
        self._results += results
        if site.sizes:
            self._results += self._called(results[-1], ops.excerpt, source, site.dim, DUMPED)
        self._measured.append(site.description)
        return True

    def _called(self, after: fx.Node, op: Any, source: fx.Node, *arguments: Any) -> list[fx.Node]:
        """Calls `op`, which has two results, behind `after`. Returns the results."""
        with self._behind(after):
            call = self._build.call(op, source, *arguments, like=source)
        with self._graph.inserting_after(call):
            return [self._build.pick(call, index, f"{call.name}_{index}") for index in (1, 0)][::-1]

    def _behind(self, node: fx.Node) -> AbstractContextManager[None]:
        """Returns a context that inserts behind `node`, but not between inputs."""
        inputs = self._graph.find_nodes(op="placeholder")
        return self._graph.inserting_after(inputs[-1] if node.op == "placeholder" else node)

    def guard(self, name: str, site: Site) -> bool:
        """Detects NaN and Inf in the node called `name`. Returns whether this graph has that node."""
        if (node := self._nodes.get(name)) is None:
            return False
        with self._behind(node):
            self._results.append(self._build.call(ops.nonfinite, node, like=node))
        self._measured.append(site.description)
        return True

    def deliver(self) -> bool:
        """Adds `deliver`, for all measurements so far, to the graph. Returns whether there were any."""
        if not self._measured and not self.skipped:
            return False
        (output,) = self._graph.find_nodes(op="output")
        with self._graph.inserting_before(output):
            node = self._graph.call_function(ops.deliver, (self._results, [*self._measured, *self.skipped]))
        node.meta["val"] = None
        return True
