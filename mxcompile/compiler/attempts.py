"""Calls and frames that Dynamo leaves to Python in a model that it compiles: past a limit, or given up.

    call of the model ─▶ Dynamo tries a frame ─▶ graphs             the backend makes their report
                                              ─▶ limit, or failure  the frame runs as Python, nobody is asked

Dynamo asks the backend about graphs alone. At the start of each attempt it compares the number of compiled
codes with its limits, by a function which is wrapped here. So calls past a limit are seen. The wrapper also
puts a function among those that ``torch.compile`` calls at the end of the call that is going on. All of the
model's call has run then, and a frame without new code was left to Python. A call without an attempt runs as
it does without this. Where torch has no such function (it is not public) nothing is seen.
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

from mxcompile.compiler.checks import check_call, tell_left
from mxcompile.compiler.exporting import innermost
from mxcompile.compiler.frames import TORCH, Frame, Running, frames
from mxcompile.compiler.options import Options
from mxcompile.models.names import user_path
from mxcompile.report import REGISTRY

_WRAPPER, _WRAPPER_FILE = "compile_wrapper", "_dynamo/eval_frame.py"
"""The function of torch that a call of compiled code runs in, which calls its ``cleanups`` at the end."""


def watch_attempts(options_of: Callable[[Any, Mapping[str, Any]], Options | None]) -> None:
    """From now on look at each frame that Dynamo tries to compile with this backend.

    options_of: the options of a backend with its keywords, None for another backend.
    """
    try:
        from torch._dynamo import convert_frame
        from torch._dynamo.convert_frame import exceeds_recompile_limit  # type: ignore[attr-defined]
    except ImportError:
        return

    @functools.wraps(exceeds_recompile_limit)
    def exceeds(cache_size: Any, compile_id: Any) -> tuple[bool, str]:
        exceeded, limit = exceeds_recompile_limit(cache_size, compile_id)
        compiling = sys._getframe(1).f_locals
        backend, keywords = innermost(compiling.get("compiler_fn"))
        options = options_of(backend, keywords)
        if options is not None:
            is_error = compiling.get("one_graph") or torch._dynamo.config.fail_on_recompile_limit_hit
            attempt = _Attempt.of(compiling["code"], compile_id.frame_id, getattr(backend, "root", None))
            if exceeded and not is_error:
                attempt.tell_limit(f"{limit} ({getattr(torch._dynamo.config, limit)})", options)
            _look_at_end(attempt, options, is_past_limit=exceeded)
        return exceeded, limit

    convert_frame.exceeds_recompile_limit = exceeds  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Attempt:
    """An attempt of Dynamo to compile a frame.

    code: of the frame. frame_id: Dynamo's number of the frame. num_codes: how many compiled codes it had.
    root: the model, if any. path: of the module in it whose method this is. call: of `root`, which is going
    on.
    """

    code: CodeType
    frame_id: int
    num_codes: int
    root: nn.Module | None
    path: str | None
    call: Running | None

    @classmethod
    def of(cls, code: CodeType, frame_id: int, known: nn.Module | None) -> _Attempt:
        """The attempt that is going on. known: the model, if the user has named it."""
        frame = Frame.of()
        root, own = frame.root(known), frame.locals.get("self")
        modules = () if root is None else root.named_modules()
        return cls(
            code=code,
            frame_id=frame_id,
            num_codes=_num_codes(code),
            root=root,
            path=next((user_path(raw) for raw, module in modules if module is own), None),
            call=None if root is None else frame.call_of(root),
        )

    @property
    def has_failed(self) -> bool:
        """Whether the attempt, which is over, has compiled nothing."""
        return _num_codes(self.code) <= self.num_codes

    @property
    def _where(self) -> str:
        file = self.code.co_filename
        if file.startswith(TORCH) and self.root is not None:  # what runs modules of torch's own classes
            return type(self.root).__name__
        return f"{self.code.co_qualname} ({file}:{self.code.co_firstlineno})"

    def tell_limit(self, limit: str, options: Options) -> None:
        """Say that calls which the compiled codes of the frame are not for run as Python."""
        message = f"{limit} reached by {self._where}: calls of other kinds run outside of compiled code"
        tell_left(message, options, root=self.root, frame=self.frame_id, path=self.path)

    def tell_failure(self, options: Options) -> None:
        """Say that the frame, if it was compiled before, runs as Python from now on."""
        message = (
            f"Dynamo left {self._where} to Python in a call that it could not compile (see"
            " TORCH_LOGS=graph_breaks): since then its calls run outside of compiled code"
        )
        tell_left(message, options, root=self.root, frame=self.frame_id)


def _num_codes(code: CodeType) -> int:
    return len(torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code))


class _End:
    """Called at the end of a call in which Dynamo tries to compile frames. is_whole: of a call of `root`."""

    def __init__(self, root: nn.Module | None, call: Running | None, options: Options) -> None:
        self.root = root
        self.attempts: list[_Attempt] = []
        self._call = call
        self._options = options

    def __call__(self) -> None:
        if sys.exc_info()[0] is not None:  # the call has failed
            return
        failed = [attempt for attempt in self.attempts if attempt.has_failed]
        for attempt in failed:
            attempt.tell_failure(self._options)
        root, call = self.root, self._call
        if root is not None and call is not None and (failed or REGISTRY.knows(root, self._options.group)):
            check_call(root, self._options, call.args, call.kwargs)


def _look_at_end(attempt: _Attempt, options: Options, *, is_past_limit: bool) -> None:
    """Look at `attempt` once the call is over that it belongs to."""
    wrapper, is_whole = _wrapper(attempt.root)
    endings = None if wrapper is None else wrapper.f_locals.get("cleanups")
    if not isinstance(endings, list):
        return
    end = next((end for end in endings if isinstance(end, _End) and end.root is attempt.root), None)
    if end is None:
        endings.append(end := _End(attempt.root, attempt.call if is_whole else None, options))
    if not is_past_limit:
        end.attempts.append(attempt)


def _wrapper(root: nn.Module | None) -> tuple[FrameType | None, bool]:
    """The frame of torch's wrapper around the call of `root`, and whether it has one; else the innermost.

    The wrapper of its forward alone is around the call as well.
    """
    first: FrameType | None = None
    around: FrameType | None = None
    is_inside = False
    for frame in frames():
        if frame.f_code.co_name == _WRAPPER and frame.f_code.co_filename.endswith(_WRAPPER_FILE):
            first = first or frame
            if around is None and (is_inside or _is_call_of(root, frame.f_back)):
                around = frame
        elif _is_call_of(root, frame) and (around is None or frame is not around.f_back):
            around, is_inside = None, True  # a call further out
    return around or first, around is not None


def _is_call_of(root: nn.Module | None, frame: FrameType | None) -> bool:
    if root is None or frame is None or frame.f_code.co_name != "_call_impl":
        return False
    return frame.f_locals.get("self") is root
