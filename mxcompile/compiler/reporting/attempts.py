"""Detects calls and frames that Dynamo leaves to Python in a compiled model, past a limit or after an error.

    call of the model ─▶ Dynamo tries a frame ─▶ graphs             the backend reports them
                                              ─▶ limit, or failure  the frame runs as Python, unreported

Dynamo calls the backend only with graphs. At the start of each attempt it compares the number of compiled
codes with its limits, in a function that is wrapped here; this detects calls past a limit. The wrapper also
registers a cleanup that ``torch.compile`` runs at the end of the current call. A frame without new code by
then was left to Python. Calls without an attempt have no overhead. In a torch without this private function
nothing is detected.

Dynamo does not notify the backend about a module whose forward it skips, or that the model never calls. The
first call is therefore compared with the plan. If the user compiles single modules, it is the second call,
because they are compiled within the first. The call runs through the model's ``_compiled_call_impl``, which
copies of the model do not have, and which is restored before the call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from mxcompile.compiler.hooks.exporting import innermost
from mxcompile.compiler.reporting.checks import check_call, check_modules, report_uncompiled
from mxcompile.compiler.reporting.shared_code import Runs
from mxcompile.compiler.session.frames import TORCH, Frame, Running, frames, is_call_of, is_wrapper
from mxcompile.compiler.session.options import Options
from mxcompile.compiler.session.session import path_of, session_of
from mxcompile.report import REGISTRY


def watch_attempts(options_of: Callable[[Any, Mapping[str, Any]], Options | None]) -> None:
    """Makes Dynamo report each attempt to compile a frame with this backend.

    options_of: returns the options of a backend with its keywords, or None for another backend.
    """
    try:
        from torch._dynamo import convert_frame
        from torch._dynamo.convert_frame import exceeds_recompile_limit  # type: ignore[attr-defined]
    except ImportError:
        return

    @functools.wraps(exceeds_recompile_limit)
    def exceeds(cache_size: Any, compile_id: Any) -> tuple[bool, str]:
        exceeded, limit = exceeds_recompile_limit(cache_size, compile_id)
        compiling = sys._getframe(1).f_locals  # Dynamo passes these values to no hook
        backend, keywords = innermost(compiling.get("compiler_fn"))
        backend_options = options_of(backend, keywords)
        if backend_options is not None:
            options = backend_options.now()
            # torch itself raises at the limit under these settings
            is_error = compiling.get("one_graph") or torch._dynamo.config.fail_on_recompile_limit_hit
            reached = f"{limit} ({getattr(torch._dynamo.config, limit)})" if exceeded and not is_error else ""
            root = getattr(backend, "root", None)
            attempt = _Attempt(compiling["code"], compile_id.frame_id, root, reached)
            if reached:  # calls without matching code run as Python
                where = f"{reached} reached by {attempt.where}"
                report_uncompiled(
                    f"{where}: calls of other kinds run outside of compiled code",
                    options,
                    root=attempt.root,
                    frame=attempt.frame_id,
                    path=attempt.path,
                )
            wrapper, is_whole = _wrapper(attempt.root)
            endings = None if wrapper is None else wrapper.f_locals.get("cleanups")
            if isinstance(endings, list):  # its functions run at the end of the call
                ends = (end for end in endings if isinstance(end, _End))
                end = next((end for end in ends if end.root is attempt.root), None)
                if end is None:
                    end = _End(root=attempt.root, call=attempt.call, options=options, is_whole=is_whole)
                    endings.append(end)
                end.attempts.append(attempt)
        return exceeded, limit

    convert_frame.exceeds_recompile_limit = exceeds  # type: ignore[attr-defined]


class _Attempt:
    """An attempt of Dynamo to compile a frame.

    code: code of the frame. frame_id: Dynamo's number of the frame. num_codes: compiled codes before the
    attempt. root: the model, if any. path: path of the module whose method the frame is. is_resumed: whether
    the frame continues after a graph break. call: the running call of `root`. limit: Dynamo's limit that the
    frame has reached, or "".
    """

    def __init__(self, code: CodeType, frame_id: int, module: nn.Module | None, limit: str) -> None:
        """Describes the current attempt. module: the model, if the user has named it."""
        frame = Frame.from_stack()
        self.code, self.frame_id, self.limit = code, frame_id, limit
        self.num_codes, self.is_resumed = _num_codes(code), frame.is_resumed
        self.root = root = None if frame.backward else frame.root(module)  # no model in compiled autograd
        if root is not None:
            session_of(root).rename(frame.name_of(root))
        self.path = None if root is None else path_of(root, frame.locals.get("self"))
        self.call = None if root is None else frame.call_of(root)

    @property
    def where(self) -> str:
        """The frame, for messages."""
        file = self.code.co_filename
        if file.startswith(TORCH) and self.root is not None:  # torch's helper for modules of its own classes
            return type(self.root).__name__
        return f"{self.code.co_qualname} ({file}:{self.code.co_firstlineno})"

    def report_failure(self, options: Options) -> bool:
        """Reports that a frame with compiled code runs as Python from now on.

        Returns whether the failure is in the report, from now or from an earlier call.
        """
        if self.limit:
            return True
        message = (
            f"Dynamo left {self.where} to Python in a call that it could not compile (see"
            " TORCH_LOGS=graph_breaks): since then its calls run outside of compiled code"
        )
        return report_uncompiled(message, options, root=self.root, frame=self.frame_id)


def _num_codes(code: CodeType) -> int:
    return len(torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code))


@dataclass(kw_only=True, eq=False)
class _End:
    """Checks the attempts to compile frames of a call, at the end of the call.

    root: the model. call: the running call of `root`. is_whole: whether this call itself ends,
    not a call of a compiled part of `root`.
    """

    root: nn.Module | None
    call: Running | None
    options: Options
    is_whole: bool
    attempts: list[_Attempt] = field(default_factory=list)
    runs: Runs = field(default_factory=Runs)

    def __call__(self) -> None:
        self.runs.close()
        try:
            if sys.exc_info()[0] is None:  # else the call has failed
                self._check()
        finally:
            REGISTRY.flush()

    def _check(self) -> None:
        root, call, options = self.root, self.call, self.options
        failed = [at for at in self.attempts if _num_codes(at.code) <= at.num_codes]  # compiled nothing
        reported = [attempt.report_failure(options) for attempt in failed]
        if root is None or call is None:
            return
        has_code = not failed and bool(session_of(root).places)  # else perhaps no code has a graph
        if self.is_whole and (REGISTRY.knows(root, options.group) or not has_code):
            check_call(root, options, call, self.runs.gemms)
        session = session_of(root)
        is_checked = session.plan is None or session.ran.get(options.group) is session.plan
        if not (self.is_whole or is_checked) and root._compiled_call_impl is None:
            check_first_call(root, options, {})  # Python runs `root`, and its modules are compiled
        if not any(reported):
            starts = [attempt.path for attempt in self.attempts if not attempt.is_resumed]
            modules = [path for path in starts if path is not None]
            check_modules(root, options, call, modules, self.runs.gemms)


def _wrapper(root: nn.Module | None) -> tuple[FrameType | None, bool]:
    """Returns (frame of torch's wrapper around the call of `root`, True), or (innermost wrapper, False).

    A wrapper runs its ``cleanups`` at its end. If the forward alone is compiled, its wrapper counts.
    """
    first: FrameType | None = None
    around: FrameType | None = None
    is_inside = False
    for frame in frames():
        if is_wrapper(frame):
            first = first or frame
            if around is None and (is_inside or is_call_of(root, frame) or is_call_of(root, frame.f_back)):
                around = frame
        elif is_call_of(root, frame) and (around is None or frame is not around.f_back):
            around, is_inside = None, True  # an outer call of `root` counts instead
    return around or first, around is not None


def check_first_call(root: nn.Module, options: Options, parts: Mapping[str, nn.Module]) -> None:
    """Checks the next call of `root`, whose modules `parts` are compiled with `options`.

    The call warns, or raises `UnsupportedError` in strict mode, about layers that the policy quantizes and
    that ran outside of compiled code, and about a model without compiled code.
    """
    inner = root._compiled_call_impl

    def first(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # another torch.compile compiles the whole model
            return root._call_impl(*args, **kwargs)
        root._compiled_call_impl = inner
        with closing(Runs()) as runs, _calls_noted(parts) as called:
            result = root(*args, **kwargs)
        try:
            idle = [path for path in parts if path not in called]
            call = Running(module=root, args=args, kwargs=kwargs, directly=True)
            check_call(root, options.now(), call, runs.gemms, parts=[*parts], idle=idle)
        finally:
            REGISTRY.flush()
        return result

    first.checks_only = inner is None  # type: ignore[attr-defined]
    root._compiled_call_impl = first


@contextmanager
def _calls_noted(parts: Mapping[str, nn.Module]) -> Iterator[set[str]]:
    """Yields a set that collects the paths of the `parts` called within the context."""
    called: set[str] = set()
    compiled = {path: part._compiled_call_impl for path, part in parts.items()}

    def noting(path: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(path)
            return compiled[path](*args, **kwargs)  # type: ignore[misc]

        return call

    for path, part in parts.items():
        part._compiled_call_impl = noting(path)
    try:
        yield called
    finally:
        for path, part in parts.items():
            part._compiled_call_impl = compiled[path]
