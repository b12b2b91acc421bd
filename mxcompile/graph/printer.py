"""Text form of graphs, for logs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._logging._internal import LazyString

from mxcompile.graph.tags import GemmTag, tags_of


def printed(graph: fx.Graph) -> LazyString[[fx.Graph]]:
    """Returns the text of `graph` for a log record, made when the record is formatted."""
    return LazyString(print_ir, graph)


def print_ir(graph: fx.Graph) -> str:
    """Returns `graph` as text, one line per node: name, value, call, and the tags of matmuls."""
    return "\n".join(_line(node) for node in graph.nodes)


def _line(node: fx.Node) -> str:
    target = node.target if node.op == "call_function" else node.op
    text = f"%{node.name}{_type(node.meta.get('val'))} = {target}"
    arguments = ", ".join(
        [*map(_argument, node.args), *(f"{k}={_argument(v)}" for k, v in node.kwargs.items())]
    )
    tags = "".join(f"  # {_tag(tag)}" for tag in tags_of(node))
    return f"{text}({arguments}){tags}"


def _argument(value: Any) -> str:
    return str(fx.node.map_arg(value, lambda node: f"%{node.name}")).replace("'", "")


def _type(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ": (" + ", ".join(_type(item).removeprefix(": ") for item in value) + ")"
    if not isinstance(value, torch.Tensor):
        return ""
    return f": {str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"


def _tag(tag: GemmTag) -> str:
    parts = [tag.name or "(root)", tag.role, tag.gemm]
    if tag.choice is not None:
        parts += [tag.choice.precision, f"({tag.choice.reason})"]
    if tag.formats is not None:
        parts += [f"{tag.tensors[i]}={tag.formats[i]}" for i in (0, 1)]
    return " ".join(map(str, parts))
