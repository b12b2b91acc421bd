"""What the backend learns about a captured graph: its inputs, where it sits in the model, its identity."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from mxcompile.graph.blocks import Blocks
from mxcompile.graph.names import PARALLEL, GraphInput, module_of, source_of, user_path

_CALLS = frozenset({"__call__", "_call_impl", "_wrapped_call_impl"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """A graph as Dynamo handed it over.

    inputs: what each is, by its path below the frame's module. root: the compiled model, if known. prefix:
    path in it of the module whose frame this is. blocks: of the model. device: of the first tensor. identity:
    hash of what names the graph's layers; with_sources: the same with the lines of the user's code, and the
    inputs' shapes.
    """

    inputs: tuple[GraphInput, ...]
    root: nn.Module | None
    prefix: str
    blocks: Blocks
    device: torch.device
    identity: str
    with_sources: str


def capture(gm: fx.GraphModule, example_inputs: Sequence[Any], root: nn.Module | None) -> Capture:
    """Describe the graph module `gm`, called with `example_inputs`, a part of the model `root`."""
    root = _users_own(root if root is not None else _compiled_module())
    paths = _paths(root)
    inputs, prefixes = [], set()
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node, value in zip(placeholders, example_inputs, strict=False):
        found, prefix = _describe(node, value, paths)
        inputs.append(found)
        if prefix is not None:
            prefixes.add(prefix)
    blocks = Blocks.of(root)
    prefix = prefixes.pop() if len(prefixes) == 1 else ""
    return Capture(
        inputs=tuple(inputs),
        root=root,
        prefix=prefix,
        blocks=blocks,
        device=_device(example_inputs),
        identity=_hash((*_identity(gm, prefix), blocks)),
        with_sources=_hash((*_details(gm, example_inputs, prefix), blocks)),
    )


def _describe(node: fx.Node, value: Any, paths: dict[int, str]) -> tuple[GraphInput, str | None]:
    """The input behind a placeholder, its path relative to the frame, and the frame's prefix if known."""
    raw = _source_name(node)
    static = isinstance(value, nn.Parameter) or "_parameters[" in raw or "_buffers[" in raw
    if not static:
        return GraphInput(), None
    relative, full = user_path(raw), paths.get(id(value))
    if full is None or not relative:
        return GraphInput(path=relative, static=True), None
    if full == relative:
        return GraphInput(path=relative, static=True), ""
    if full.endswith(f".{relative}"):
        return GraphInput(path=relative, static=True), full.removesuffix(f".{relative}")
    return GraphInput(path=relative, static=True), None


def _source_name(node: fx.Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


def _paths(root: nn.Module | None) -> dict[int, str]:
    """Path of every parameter and buffer that has just one, by identity."""
    if root is None:
        return {}
    paths: dict[int, str] = {}
    shared: set[int] = set()
    for owned in (root.named_parameters, root.named_buffers):
        for raw, value in owned(remove_duplicate=False):
            if id(value) in paths:
                shared.add(id(value))
            paths[id(value)] = user_path(raw)
    return {key: path for key, path in paths.items() if key not in shared}


def _compiled_module() -> nn.Module | None:
    """The module that ``torch.compile`` was applied to, from the Python frames that led here.

    A graph break inside a submodule makes Dynamo start over from that submodule's frame; only the callers
    still know which model it belongs to.
    """
    for module in _calling_modules():
        original = getattr(module, "_orig_mod", None)
        if isinstance(original, nn.Module):
            return original
        if getattr(module, "_compiled_call_impl", None) is not None:
            return module
    return None


def _users_own(root: nn.Module | None) -> nn.Module | None:
    """The model inside wrappers that call it `module`."""
    while root is not None and type(root).__name__ in PARALLEL:
        root = root.get_submodule("module")
    return root


def _calling_modules() -> Iterator[nn.Module]:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name in _CALLS:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                yield module
        frame = frame.f_back  # type: ignore[assignment]


def _device(example_inputs: Sequence[Any]) -> torch.device:
    """The device the graph computes on: an accelerator if any input is on one."""
    devices = [value.device for value in example_inputs if isinstance(value, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _hash(parts: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(repr(part).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _identity(gm: fx.GraphModule, prefix: str) -> Iterator[Any]:
    """What tells apart graphs that compute alike but are named differently."""
    yield prefix
    for node in gm.graph.nodes:
        yield node.op, _source_name(node) if node.op == "placeholder" else module_of(node)


def _details(gm: fx.GraphModule, example_inputs: Sequence[Any], prefix: str) -> Iterator[Any]:
    """Everything a report depends on."""
    yield from _identity(gm, prefix)
    for node in gm.graph.nodes:
        target = node._pretty_print_target(node.target)
        yield target, str(node.args), str(node.kwargs), source_of(node)
        value = node.meta.get("example_value")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            yield tuple(map(str, value.shape)), str(value.dtype), str(value.device)
            yield value.requires_grad
    for value in example_inputs:
        yield isinstance(value, nn.Parameter)
    yield torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    for kind in ("cpu", "cuda"):
        yield torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    for child in gm.children():
        if isinstance(child, fx.GraphModule):
            yield from _details(child, (), prefix)
