"""Finds the user's model and call for a graph, from the Python frames above the backend.

    user's call ─▶ root(*args) ─▶ … ─▶ module(*args) ─▶ frame that Dynamo compiles ─▶ backend

Dynamo passes only the graph. The model and the arguments of its call exist only in the callers' frames: after
a graph break Dynamo starts from a submodule's frame, and a block that is compiled alone has no link to its
model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, MethodType
from typing import Any

import torch
from torch import fx, nn

from mxcompile.models.tree import models_of
from mxcompile.models.wrappers import user_model

_CALLS = frozenset({"__call__", "_call_impl", "_wrapped_call_impl"})
_WRAPPER, _WRAPPER_FILE = "compile_wrapper", "_dynamo/eval_frame.py"
"""Torch's function around each call of compiled code, and its file."""
_RESUMED = "torch_dynamo_resume_in"
_BEFORE, _AFTER = _BREAKS = "before a graph break", "after a graph break"
_COMPILED_AUTOGRAD = "torch/_dynamo/compiled_autograd.py"
STAGE = "a pipeline stage"
"""Reason why a graph is only a part: the model is a pipeline stage, and no process has the whole model."""
TORCH = f"{torch.__path__[0]}/"
"""Folder of torch's own code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """A module whose call is running, with its arguments.

    directly: whether only torch's own frames lie between this call and the compiled frame. is_call: whether
    the module itself was called, not another method that ``torch.compile`` was given.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    directly: bool
    is_call: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """The frame that Dynamo compiles.

    locals, globals: scopes for the names of graph inputs. running: running modules above the frame, innermost
    first. backward: whether compiled autograd compiles the backward of earlier graphs. parts: reasons why the
    graph covers only a part of the code. models: the models of the compiled function by path, if there are
    several. model: the model, if there is one. defaults: default values of arguments of the function, and of
    the running module's forward.
    """

    locals: Mapping[str, Any] = field(default_factory=dict)
    globals: Mapping[str, Any] = field(default_factory=dict)
    running: tuple[Running, ...] = ()
    parts: tuple[str, ...] = ()
    backward: bool = False
    models: Mapping[str, nn.Module] = field(default_factory=dict)
    model: nn.Module | None = None
    defaults: tuple[Any, ...] = ()

    @classmethod
    def from_stack(cls, gm: fx.GraphModule | None = None) -> Frame:
        """Returns the frame that Dynamo is compiling. gm: the graph of the frame, if it exists."""
        running: list[Running] = []
        parts = [_BEFORE] * is_broken(gm)
        scope: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
        directly, backward = True, False
        call: FrameType | None = None
        for frame in frames():
            compiled = _compiled(frame)
            if compiled is not None and scope is None:
                scope = compiled.f_locals, compiled.f_globals
                if compiled.f_code.co_name.startswith(_RESUMED):
                    parts.append(_AFTER)
                # inner calls belong to Dynamo and the backend
                running, directly = [], True
            parts += _split(frame)
            backward |= frame.f_code.co_filename.endswith(_COMPILED_AUTOGRAD)
            if scope is not None and call is None and is_wrapper(frame):
                call = frame
            module = _module_of(frame)
            if module is not None:
                _add(running, module, frame, directly)
            elif not frame.f_code.co_filename.startswith(TORCH):
                directly = False
        scope = scope or ({}, {})
        models = _models(call) if call is not None else {}
        return cls(
            locals=scope[0],
            globals=scope[1],
            running=tuple(running),
            parts=tuple(dict.fromkeys(parts)),
            backward=backward,
            models=models if len(models) > 1 else {},
            model=next(iter(models.values())) if len(models) == 1 else None,
            defaults=tuple(_defaults(call, running)),
        )

    def evaluate(self, source: str) -> Any:
        """Returns the object behind a source name of Dynamo, or None if the frame cannot evaluate it."""
        try:
            return eval(source, {"L": self.locals, "G": self.globals, "getattr": getattr})
        except Exception:  # Dynamo's own names; a property may raise anything
            return None

    def root(self, module: nn.Module | None) -> nn.Module | None:
        """Returns the user's model: `module`, the compiled module, or the model around a compiled block."""
        if module is not None:
            return user_model(module)
        compiled = next((top for call in self.running if (top := _unwrapped_if_compiled(call.module))), None)
        outer = next((user_model(call.module) for call in reversed(self.running)), None)
        if compiled is None or outer is None or outer is compiled:
            return compiled or outer
        return outer if _is_block(compiled, outer) else compiled

    def name_of(self, root: nn.Module | None) -> str:
        """Returns the path of the model `root` among `models`, or ""."""
        return next((path for path, model in self.models.items() if model is root), "")

    def call_of(self, root: nn.Module) -> Running | None:
        """Returns the outermost running call of `root`."""
        calls = (call for call in reversed(self.running) if call.is_call)
        return next((call for call in calls if user_model(call.module) is root), None)

    @property
    def is_resumed(self) -> bool:
        """Whether the frame continues a function after a graph break."""
        return _AFTER in self.parts

    def cut(self, root: nn.Module | None, called: nn.Module | None = None) -> str:
        """Returns why the graph covers only a part of `root`, or "" if it covers the whole.

        called: the only module that a compiled function calls. Without nested graph breaks Dynamo inlines a
        call completely or not at all, so that a break elsewhere in the function leaves the module whole.
        Under compiled autograd ``loss.backward()`` is an example of this.
        """
        nested = getattr(torch._dynamo.config, "nested_graph_breaks", False)
        inlined = root is None and called is not None and not self.running and not nested
        parts = [part for part in self.parts if not (inlined and part in _BREAKS)]
        if parts:
            return parts[0]
        if root is None or not self.running:
            return ""
        innermost = self.running[0]
        if user_model(innermost.module) is root and innermost.directly:
            return ""
        return f"a frame inside {type(root).__name__}"


def running() -> Iterator[nn.Module]:
    """Yields the modules whose calls are running in this thread, innermost first."""
    for frame in frames():
        module = _module_of(frame)
        if module is not None:
            yield module


def called_models() -> Mapping[str, nn.Module]:
    """Returns, by path, the models of the compiled function that this thread calls."""
    return next((_models(frame) for frame in frames() if is_wrapper(frame)), {})


def is_running(root: nn.Module) -> bool:
    """Whether a call of `root` is running in this thread."""
    return any(user_model(module) is root for module in running())


def frames() -> Iterator[FrameType]:
    """Yields the frames of this thread, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_wrapper(frame: FrameType) -> bool:
    """Whether `frame` is torch's function around a call of compiled code."""
    return frame.f_code.co_name == _WRAPPER and frame.f_code.co_filename.endswith(_WRAPPER_FILE)


def is_call_of(root: nn.Module | None, frame: FrameType | None) -> bool:
    """Whether `frame` calls `root`, or its forward if that alone is compiled."""
    if root is None or frame is None:
        return False
    method = _method(frame)
    if frame.f_code.co_name != "_call_impl" and (method is None or method.__name__ != "forward"):
        return False
    module = _module_of(frame)  # for torch's own classes, an OptimizedModule
    return module is not None and user_model(module) is root


def _method(frame: FrameType) -> MethodType | None:
    """Returns the module's method that ``torch.compile`` was given, if `frame` is the wrapper around it."""
    function = frame.f_locals.get("fn") if is_wrapper(frame) else None
    if not isinstance(function, MethodType) or not isinstance(function.__self__, nn.Module):
        return None
    return None if function.__name__ in _CALLS else function


def _module_of(frame: FrameType) -> nn.Module | None:
    """Returns the module that `frame` calls, or whose compiled method it runs."""
    method = _method(frame)
    module = frame.f_locals.get("self") if frame.f_code.co_name in _CALLS else None
    module = module if method is None else method.__self__
    return module if isinstance(module, nn.Module) else None


def _compiled(frame: FrameType) -> Any:
    """Returns the frame that Dynamo compiles in `frame`, or None if `frame` is not Dynamo's."""
    if not frame.f_code.co_filename.endswith("convert_frame.py"):
        return None
    inner_frame = frame.f_locals.get("frame")
    return inner_frame if hasattr(inner_frame, "f_code") and hasattr(inner_frame, "f_locals") else None


def is_broken(gm: fx.GraphModule | None) -> bool:
    """Whether a graph break ends the graph `gm` of Dynamo."""
    return bool(getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False))


def _split(frame: FrameType) -> Iterator[str]:
    """Yields why the graph is only a part, if `frame` belongs to DDP's graph splitter or a pipeline stage.

    Skips user frames, because a read of `f_locals` keeps their objects alive as long as the frame.
    """
    if not frame.f_code.co_filename.startswith(TORCH):
        return
    owner = frame.f_locals.get("self")
    names = {kind.__name__ for kind in type(owner).__mro__}
    if "SubmodCompiler" in names:
        yield "a bucket of DistributedDataParallel"
    if "_PipelineStageBase" in names and not (owner.is_first and owner.is_last):  # type: ignore[union-attr]
        yield STAGE


def _models(call: FrameType) -> Mapping[str, nn.Module]:
    """Returns the models of the function that `call`, torch's wrapper, calls."""
    function, args, kwargs = (call.f_locals.get(name) for name in ("fn", "args", "kwargs"))
    return models_of(function, args or (), kwargs or {})


def _defaults(call: FrameType | None, running: Sequence[Running]) -> Iterator[Any]:
    """Yields the default values of the function that torch's wrapper `call` calls, and of a forward."""
    functions: list[Any] = [runner.module.forward for runner in running[:1]]
    functions += [] if call is None else [call.f_locals.get("fn")]
    for function in (getattr(value, "__func__", value) for value in functions):
        yield from getattr(function, "__defaults__", None) or ()
        yield from (getattr(function, "__kwdefaults__", None) or {}).values()


def _add(running: list[Running], module: nn.Module, frame: FrameType, directly: bool) -> None:
    """Adds a call of `module` with the arguments of its outermost frame, which are the user's."""
    args, kwargs = frame.f_locals.get("args"), frame.f_locals.get("kwargs")
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        return
    method = _method(frame)
    is_call = method is None or method.__name__ == "forward"
    if running and running[-1].module is module:
        directly = running.pop().directly
    running.append(Running(module=module, args=args, kwargs=kwargs, directly=directly, is_call=is_call))


def _unwrapped_if_compiled(module: nn.Module) -> nn.Module | None:
    call = getattr(module, "_compiled_call_impl", None)
    if "_orig_mod" in module._modules or (call is not None and not getattr(call, "checks_only", False)):
        return user_model(module)
    return None


def _is_block(part: nn.Module, whole: nn.Module) -> bool:
    """Whether `part` is one of several compiled modules in `whole`, or a member of a module list."""
    compiled = {id(model) for module in whole.modules() if (model := _unwrapped_if_compiled(module))}
    lists = (nn.ModuleList, nn.ModuleDict)
    members = {
        id(user_model(child))
        for module in whole.modules()
        if isinstance(module, lists)
        for child in module.children()
    }
    return id(part) in members or (id(part) in compiled and len(compiled) > 1)
