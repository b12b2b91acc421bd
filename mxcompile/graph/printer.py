"""Text form of graphs, for logs and torch's structured trace (``TORCH_TRACE``), which tlparse renders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._logging._internal import LazyString, trace_structured

from mxcompile.graph.tags import tags_of


def printed(graph: fx.Graph) -> LazyString[[fx.Graph]]:
    """Returns the text of `graph` for a log record, made when the record is formatted."""
    return LazyString(print_ir, graph)


def trace_graph(graph: fx.Graph, when: str) -> None:
    """Adds `graph` to the structured trace. when: "before" or "after" the passes."""
    add_artifact(f"mxcompile_{when}_passes", lambda: print_ir(graph))


def add_artifact(name: str, text: Callable[[], str]) -> None:
    """Adds an artifact beside the artifacts of Dynamo and Inductor. Without a trace no text is built."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)


def print_ir(graph: fx.Graph) -> str:
    """Returns `graph` as text, one line per node: name, value, call, and the tags of matmuls."""
    lines = []
    for node in graph.nodes:
        target = node.target if node.op == "call_function" else node.op
        keywords = (f"{key}={_argument(value)}" for key, value in node.kwargs.items())
        arguments = ", ".join([*map(_argument, node.args), *keywords])
        line = f"%{node.name}{_type(node.meta.get('val'))} = {target}({arguments})"
        for tag in tags_of(node):
            parts = [tag.name or "(root)", tag.role, tag.gemm]
            if tag.choice is not None:
                parts += [tag.choice.precision, f"({tag.choice.reason})"]
            if tag.formats is not None:
                parts += [f"{tag.tensors[i]}={tag.formats[i]}" for i in (0, 1)]
            line += f"  # {' '.join(map(str, parts))}"
        lines.append(line)
    return "\n".join(lines)


def _argument(value: Any) -> str:
    return str(fx.node.map_arg(value, lambda node: f"%{node.name}")).replace("'", "")


def _type(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ": (" + ", ".join(_type(item).removeprefix(": ") for item in value) + ")"
    if not isinstance(value, torch.Tensor):
        return ""
    return f": {str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
