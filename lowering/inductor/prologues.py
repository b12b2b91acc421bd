"""prologues: compute what a cast reads where the cast would load it.

    producer ─▶ x ─▶ cast     becomes     cast(producer)        x is never stored

The producer is a pointwise kernel-to-be whose result only the cast reads: a norm's second half, SwiGLU's
product, the transposition behind an attention. Left to itself Inductor's scheduler gives it to what comes
before it (a norm's row statistic, the GEMM that makes one of SwiGLU's factors) and stores x. So this runs
before the scheduler fuses anything. A producer that reads more than two tensors of x's size is left alone:
it is cheaper to store what it makes. The two producers of a cast of two tensors may read three.
"""

from __future__ import annotations

from typing import Any

from torch._inductor import ir
from torch._inductor.scheduler import BaseSchedulerNode, SchedulerNode
from torch._inductor.virtualized import V

from mxcompile import ops
from mxcompile.graph.opsets import packet
from mxcompile.graph.tags import tags_of
from mxcompile.lowering.inductor.scheduling import Nodes, SchedulerPass

_MOST_READS = 2.25  # of x's size: two tensors, and some small ones beside them; one more for a second x


class Prologues(SchedulerPass):
    """Fuses producers into casts."""

    def apply(self, nodes: Nodes) -> Nodes:
        """`nodes`, in an order that respects their dependencies, with casts and their producers fused."""
        producers = {node.get_name(): node for node in nodes if _is_pointwise(node)}
        result: Nodes = []
        for node in nodes:
            fused = node
            for producer in _producers(node, producers) if _is_cast(node) else ():
                result.remove(producer)
                fused = _fuse(producer, fused)
            result.append(fused)
        return result


def _is_pointwise(node: BaseSchedulerNode) -> bool:
    return (
        isinstance(node, SchedulerNode)
        and isinstance(node.node, ir.ComputedBuffer)
        and isinstance(node.node.data, ir.Pointwise)
        and not node.has_aliasing_or_mutation()
    )


def _is_cast(node: BaseSchedulerNode) -> bool:
    """Whether `node` is a cast's kernel, not a product's, among whose origins casts that it reads can be."""
    buffer = node.node
    if not isinstance(buffer, ir.TritonTemplateBuffer):
        return False
    casts = any(packet(origin) in ops.CASTS for origin in buffer.origins)
    return casts and not any(map(tags_of, buffer.origins))


def _producers(cast: BaseSchedulerNode, producers: dict[str, BaseSchedulerNode]) -> list[BaseSchedulerNode]:
    """Returns the producers of what `cast` reads that only it reads and that read little themselves."""
    assert isinstance(cast.node, ir.TritonTemplateBuffer)
    inlined = []
    for name in cast.node.get_allowed_prologue_inps():
        buffer = cast.scheduler.name_to_buf.get(name)
        producer = None if buffer is None else producers.get(buffer.defining_op_name())
        if producer is None:
            continue
        (output,) = producer.get_outputs()
        if [user.node for user in output.users] == [cast]:
            inlined.append(producer)
    return inlined if inlined and _reads(inlined) <= _most_reads(inlined) else []


def _most_reads(producers: list[BaseSchedulerNode]) -> float:
    (output,) = producers[0].get_outputs()
    return (_MOST_READS + len(producers) - 1) * _size(output.node)


def _reads(producers: list[BaseSchedulerNode]) -> float:
    """Elements that `producers` read, each once: of a tensor that is read at several places, what it has."""
    read: dict[str, float] = {}
    for dependency in {each for producer in producers for each in producer.read_writes.reads}:
        read[dependency.name] = read.get(dependency.name, 0.0) + _hint(dependency.get_numel())
    # what a template writes beside its result has a name of its own afterwards, and no size
    wholes = {name: _hint(V.graph.get_numel(name)) for name in read}
    return sum(min(size, wholes[name]) if wholes[name] > 1 else size for name, size in read.items())


def _hint(numel: Any) -> float:
    return float(V.graph.sizevars.optimization_hint(numel, fallback=0))


def _size(buffer: Any) -> float:
    return _hint(buffer.get_numel())


def _fuse(producer: BaseSchedulerNode, cast: BaseSchedulerNode) -> BaseSchedulerNode:
    scheduler = cast.scheduler
    backend = scheduler.get_backend(cast.get_device())
    both: BaseSchedulerNode = backend.fuse(producer, cast)
    both.group = cast.group  # of as many elements as the cast stores, packed ones half of what it reads
    scheduler.name_to_fused_node.update({node.get_name(): both for node in both.get_nodes()})
    return both
