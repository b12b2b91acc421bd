"""prologues: fuse the producer of a cast's input into the kernel of the cast.

    producer ─▶ x ─▶ cast     becomes     cast(producer)        x is never stored

A producer is a pointwise node whose result only the cast reads: a norm's second half, SwiGLU's product, the
transpose after an attention. Inductor's scheduler would fuse it with the node before it (a norm's row
statistic, the GEMM of one of SwiGLU's factors) and store x. So this pass runs before the scheduler fuses
nodes. It skips a producer that reads more than two tensors of x's size, because storing x is then cheaper.
The two producers of a cast of two tensors may read three. It also skips functions of angles (`_LONG`).
"""

from __future__ import annotations

from typing import Any, TypeGuard

from torch._inductor import ir
from torch._inductor.scheduler import BaseSchedulerNode, SchedulerNode
from torch._inductor.virtualized import V

from mxcompile import ops
from mxcompile.graph.opsets import packet
from mxcompile.graph.tags import tags_of
from mxcompile.lowering.inductor.scheduling import Nodes, SchedulerPass

_MOST_READS = 2.25  # in units of x's size: two tensors and small tensors; 1 more for a second x
_LONG = ("sin", "cos", "tan")  # their code for large arguments needs the registers of the cast, which spills


class Prologues(SchedulerPass):
    """Fuses producers into casts."""

    def apply(self, nodes: Nodes) -> Nodes:
        """Returns `nodes`, in an order that respects dependencies, with producers fused into casts."""
        producers = {node.get_name(): node for node in nodes if _is_pointwise(node)}
        result: Nodes = []
        for node in nodes:
            fused = node
            for producer in _producers(node, producers) if _is_cast(node) else ():
                result.remove(producer)
                fused = _fuse(producer, fused)
            result.append(fused)
        return result


def _is_pointwise(node: BaseSchedulerNode) -> TypeGuard[SchedulerNode]:
    return (
        isinstance(node, SchedulerNode)
        and isinstance(node.node, ir.ComputedBuffer)
        and isinstance(node.node.data, ir.Pointwise)
        and not node.has_aliasing_or_mutation()
    )


def _is_cast(node: BaseSchedulerNode) -> bool:
    """Whether `node` is the kernel of a cast. The origins of a product's kernel may have casts too."""
    buffer = node.node
    if not isinstance(buffer, ir.TritonTemplateBuffer):
        return False
    casts = any(packet(origin) in ops.CASTS for origin in buffer.origins)
    return casts and not any(map(tags_of, buffer.origins))


def _producers(cast: BaseSchedulerNode, producers: dict[str, SchedulerNode]) -> list[SchedulerNode]:
    """Returns the producers of the inputs of `cast` that only it reads; [] if they read too much."""
    assert isinstance(cast.node, ir.TritonTemplateBuffer)
    inlined = []
    for name in cast.node.get_allowed_prologue_inps():
        buffer = cast.scheduler.name_to_buf.get(name)
        producer = None if buffer is None else producers.get(buffer.defining_op_name())
        if producer is None:
            continue
        (output,) = producer.get_outputs()
        long = any(map(producer._body.has_op, _LONG))
        if [user.node for user in output.users] == [cast] and not long:
            inlined.append(producer)
    if not inlined:
        return []
    (output,) = inlined[0].get_outputs()
    most = (_MOST_READS + len(inlined) - 1) * _hint(output.node.get_numel())
    return inlined if _reads(inlined) <= most else []


def _reads(producers: list[SchedulerNode]) -> float:
    """Returns the number of elements that `producers` read; overlapping reads of a tensor count once."""
    read: dict[str, float] = {}
    for dependency in {dep for producer in producers for dep in producer.read_writes.reads}:
        read[dependency.name] = read.get(dependency.name, 0.0) + _hint(dependency.get_numel())
    # extra outputs of a template have names without a size
    wholes = {name: _hint(V.graph.get_numel(name)) for name in read}
    return sum(min(size, wholes[name]) if wholes[name] > 1 else size for name, size in read.items())


def _hint(numel: Any) -> float:
    return float(V.graph.sizevars.optimization_hint(numel, fallback=0))


def _fuse(producer: BaseSchedulerNode, cast: BaseSchedulerNode) -> BaseSchedulerNode:
    scheduler = cast.scheduler
    backend = scheduler.get_backend(cast.get_device())
    both: BaseSchedulerNode = backend.fuse(producer, cast)
    both.group = cast.group  # as many elements as the cast stores: packed copies have half of its inputs
    scheduler.name_to_fused_node.update({node.get_name(): both for node in both.get_nodes()})
    return both
