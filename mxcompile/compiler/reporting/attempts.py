"""Detects calls and frames that Dynamo leaves to Python in a compiled model, past a limit or after an error.

    call of the model ─▶ Dynamo tries a frame ─▶ graphs             the backend reports them
                                              ─▶ limit, or failure  the frame runs as Python, unreported

Dynamo calls the backend only with graphs. At the start of each attempt it compares the number of compiled
codes with its limits, in a function that is wrapped here; this detects calls past a limit. The wrapper also
registers a cleanup that ``torch.compile`` runs at the end of the current call. A frame without new code by
then was left to Python. Calls without an attempt have no overhead. In a torch without this private function
nothing is detected.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from mxcompile.compiler.hooks.exporting import innermost
from mxcompile.compiler.reporting.checks import check_call, check_modules, report_uncompiled
from mxcompile.compiler.reporting.first_call import check_first_call
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
            attempt = _Attempt.from_code(compiling["code"], compile_id.frame_id, root, reached)
            attempt.report_limit(options)
            _check_at_end(attempt, options)
        return exceeded, limit

    convert_frame.exceeds_recompile_limit = exceeds  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Attempt:
    """An attempt of Dynamo to compile a frame.

    code: code of the frame. frame_id: Dynamo's number of the frame. num_codes: compiled codes before the
    attempt. root: the model, if any. path: path of the module whose method the frame is. is_resumed: whether
    the frame continues after a graph break. call: the running call of `root`. limit: Dynamo's limit that the
    frame has reached, or "".
    """

    code: CodeType
    frame_id: int
    num_codes: int
    root: nn.Module | None
    path: str | None
    is_resumed: bool
    call: Running | None
    limit: str

    @classmethod
    def from_code(cls, code: CodeType, frame_id: int, module: nn.Module | None, limit: str) -> _Attempt:
        """Returns the current attempt. module: the model, if the user has named it."""
        frame = Frame.from_stack()
        root = None if frame.backward else frame.root(module)  # compiled autograd's graph is not a model
        if root is not None:
            session_of(root).rename(frame.name_of(root))
        return cls(
            code=code,
            frame_id=frame_id,
            num_codes=_num_codes(code),
            root=root,
            path=None if root is None else path_of(root, frame.locals.get("self")),
            is_resumed=frame.is_resumed,
            call=None if root is None else frame.call_of(root),
            limit=limit,
        )

    @property
    def has_failed(self) -> bool:
        """Whether the finished attempt has compiled nothing."""
        return _num_codes(self.code) <= self.num_codes

    @property
    def _where(self) -> str:
        file = self.code.co_filename
        if file.startswith(TORCH) and self.root is not None:  # torch's helper for modules of its own classes
            return type(self.root).__name__
        return f"{self.code.co_qualname} ({file}:{self.code.co_firstlineno})"

    def report_limit(self, options: Options) -> None:
        """Reports, past a limit, that calls without matching code run as Python."""
        message = f"{self.limit} reached by {self._where}: calls of other kinds run outside of compiled code"
        if self.limit:
            report_uncompiled(message, options, root=self.root, frame=self.frame_id, path=self.path)

    def report_failure(self, options: Options) -> bool:
        """Reports that a frame with compiled code runs as Python from now on.

        Returns whether the failure is in the report, from now or from an earlier call.
        """
        if self.limit:
            return True
        message = (
            f"Dynamo left {self._where} to Python in a call that it could not compile (see"
            " TORCH_LOGS=graph_breaks): since then its calls run outside of compiled code"
        )
        return report_uncompiled(message, options, root=self.root, frame=self.frame_id)


def _num_codes(code: CodeType) -> int:
    return len(torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code))


class _End:
    """Checks the attempts to compile frames of a call, at the end of the call.

    root: the model. call: the running call of `root`. is_whole: whether this call itself ends,
    not a call of a compiled part of `root`.
    """

    def __init__(
        self, root: nn.Module | None, call: Running | None, options: Options, *, is_whole: bool
    ) -> None:
        self.root = root
        self.attempts: list[_Attempt] = []
        self._call = call
        self._options = options
        self._is_whole = is_whole
        self._runs = Runs()

    def __call__(self) -> None:
        self._runs.close()
        try:
            if sys.exc_info()[0] is None:  # else the call has failed
                self._check()
        finally:
            REGISTRY.flush()

    def _check(self) -> None:
        root, call, options = self.root, self._call, self._options
        failed = [attempt for attempt in self.attempts if attempt.has_failed]
        reported = [attempt.report_failure(options) for attempt in failed]
        if root is None or call is None:
            return
        has_code = not failed and bool(session_of(root).places)  # else perhaps no code has a graph
        if self._is_whole and (REGISTRY.knows(root, options.group) or not has_code):
            check_call(root, options, call.args, call.kwargs, self._runs.gemms)
        session = session_of(root)
        is_checked = session.plan is None or session.ran.get(options.group) is session.plan
        if not (self._is_whole or is_checked) and root._compiled_call_impl is None:
            check_first_call(root, options, {})  # Python runs `root`, and its modules are compiled
        if not any(reported):
            starts = [attempt.path for attempt in self.attempts if not attempt.is_resumed]
            modules = [path for path in starts if path is not None]
            check_modules(root, options, call.args, call.kwargs, modules, self._runs.layers)


def _check_at_end(attempt: _Attempt, options: Options) -> None:
    """Registers `attempt` for a check at the end of its call."""
    wrapper, is_whole = _wrapper(attempt.root)
    endings = None if wrapper is None else wrapper.f_locals.get("cleanups")
    if not isinstance(endings, list):
        return
    end = next((end for end in endings if isinstance(end, _End) and end.root is attempt.root), None)
    if end is None:
        endings.append(end := _End(attempt.root, attempt.call, options, is_whole=is_whole))
    end.attempts.append(attempt)


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
