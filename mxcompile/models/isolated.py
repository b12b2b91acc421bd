"""A function that runs the user's program without a trace: in a forked child that returns the result.

    fork ─▶ child: confined, function(), pickled result ─▶ pipe ─▶ result, log records
         └▶ parent: waits, and kills a child that hangs

The child has copies of all objects. So nothing that the function does to them reaches the program: globals,
closures, classes, hooks, iterators, random generators. `confined` keeps the child away from the rest: files,
processes, sockets, memory that processes share. What ends the child (an exit, a crash, a hang) is the reason
of a `ModelError` here.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch._dynamo.convert_frame import compile_lock

from mxcompile.errors import ModelError, MXCompileError
from mxcompile.models.confined import Before, confine, is_tool

Result = TypeVar("Result")
Messages = list[Callable[[], None]]
"""Calls that show in the parent what the child has logged or warned of."""

log = logging.getLogger(__name__)

_IDLE_S, _BUSY_S = 30, 0.1
"""A child hangs if it computes less than the latter in the former."""
_LIBRARIES = ("mxcompile", "torch")
"""Whose log records are passed on. The user's own program logs and warns when it runs, not here."""
_PLAIN = (str, int, float, type(None))
_CHILD = "the process that runs the model on fake tensors"
_TOKENIZERS = "TOKENIZERS_PARALLELISM"

_IN_CHILD: ContextVar[bool] = ContextVar("_IN_CHILD", default=False)


class ChildError(ModelError):
    """A child that runs a model on fake tensors crashed or hung."""


class NoChildError(ChildError):
    """No such child can be started."""


def isolated(function: Callable[[], Result], *, tools: bool = False) -> Result:
    """Returns what `function` returns, called in a child of this process; in a child, called directly.

    Args:
        function: Its result can be pickled. It needs no accelerator.
        tools: Whether `function` compiles. Then torch and Triton may write their caches and start compilers,
            and autograd has to work in the child.

    Raises:
        NoChildError: If this process can have no such child.
        ChildError: If the child crashes or hangs.
        MXCompileError: If `function` raises it.
        ModelError: If `function` raises anything else.
    """
    if _IN_CHILD.get():
        try:
            return function()
        except BaseException as error:
            raise _ours(error) from error
    source, sink = os.pipe()
    try:
        pid = _fork(function, sink, tools=tools)
    except BaseException:
        os.close(source)
        raise
    finally:
        os.close(sink)
    answer = b""
    try:
        answer = _answer(source, pid)
    finally:
        os.close(source)
        status = _end(pid)
    try:
        outcome, messages = pickle.loads(answer)
    except Exception as error:  # there is none, or not all of it
        raise ChildError(f"{_CHILD} ended without a result: {_how(status)}") from error
    for show in messages:
        show()
    if isinstance(outcome, MXCompileError):
        raise outcome
    result: Result = outcome[0]
    return result


def _fork(function: Callable[[], Any], sink: int, *, tools: bool) -> int:
    """Start the child that sends the result of `function` to `sink`. Returns its number."""
    before = Before.now()
    quiet = "tokenizers" in sys.modules and _TOKENIZERS not in os.environ  # else it prints at every fork
    if quiet:
        os.environ[_TOKENIZERS] = "false"
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # handlers are for the parent
    try:
        # held by another thread, the lock would never open in the child
        with compile_lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python and libraries that know of other threads
            pid = os.fork()
        if pid == 0:
            _run(function, sink, before, mask, tools=tools)
    except (OSError, RuntimeError) as error:
        raise NoChildError(f"cannot start {_CHILD}: {error}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if quiet:
            os.environ.pop(_TOKENIZERS, None)
    return pid


def _run(function: Callable[[], Any], sink: int, before: Before, mask: Any, *, tools: bool) -> NoReturn:
    """In the child: send the result of `function` to `sink`, and end."""
    try:
        messages: Messages = []
        try:
            _IN_CHILD.set(True)
            gc.freeze()  # what is garbage in the parent has its finalizers run there
            _listen(messages, tools=tools)
            confine(before, sink, tools=tools)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if tools:
                _check_autograd()
            answer = pickle.dumps(((function(),), messages))
        except BaseException as error:  # a forward may raise SystemExit
            answer = pickle.dumps((_ours(error), messages))
        rest = memoryview(answer)
        while rest:
            rest = rest[os.write(sink, rest) :]
    finally:
        os._exit(0)


def _check_autograd() -> None:
    """Raises `NoChildError` if autograd has had threads in the parent, for an accelerator: it needs them."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            leaf = torch.zeros((), device="cpu", requires_grad=True)
            torch.autograd.grad(leaf * 1, leaf)
    except RuntimeError as error:
        raise NoChildError(f"{_CHILD} cannot compute gradients: {error}") from error


# The first gradient starts a thread for each device. Without one, `FakeTensorMode` gives CUDA 8 fake devices,
# so a first gradient is computed before.
if torch.backends.cuda.is_built() and not torch.cuda.device_count():
    with suppress(NoChildError):  # this process is a fork of one with such threads
        _check_autograd()


def _ours(error: BaseException) -> MXCompileError:
    """Returns `error` if it is one of ours, else a `ModelError` with its message."""
    if isinstance(error, MXCompileError):
        return error
    log.debug("cannot run the model on fake tensors", exc_info=error)
    what = str(error).strip().partition("\n")[0]
    return ModelError(f"cannot run the model on fake tensors: {type(error).__name__}: {what}")


def _listen(messages: Messages, *, tools: bool) -> None:
    """Add to `messages` what libraries log and, if `tools`, warn of."""

    def keep_record(_: logging.Logger, record: logging.LogRecord) -> None:
        if record.name.partition(".")[0] in _LIBRARIES:
            with suppress(Exception):
                text = logging.Formatter().format(record)
                plain = {name: value for name, value in vars(record).items() if isinstance(value, _PLAIN)}
                whole = {"msg": text, "args": None, "exc_text": None, "stack_info": None}
                messages.append(partial(_log, plain | whole))

    def keep_warning(message: Any, category: Any, filename: str, lineno: int, *_: Any, **__: Any) -> None:
        show = partial(warnings.warn_explicit, str(message), category, filename, lineno)
        if tools and is_tool(filename):
            with suppress(Exception):
                pickle.dumps(show)
                messages.append(show)

    logging.Logger.handle = keep_record  # type: ignore[method-assign,assignment]
    logging.getLogger("torch.__trace").handlers.clear()  # else torch describes every tensor
    warnings.showwarning = keep_warning


def _log(record: dict[str, Any]) -> None:
    logging.getLogger(record["name"]).handle(logging.makeLogRecord(record))


def _answer(source: int, pid: int) -> bytes:
    """Returns what child `pid` sends through the pipe `source`. Raises `ChildError` if it hangs."""
    chunks: list[bytes] = []
    ready = select.poll()
    ready.register(source, select.POLLIN)
    used_s, idle_s = 0.0, 0  # counted, since both processes may be stopped for a while
    while idle_s < _IDLE_S:
        if ready.poll(1000):
            chunk = os.read(source, 1 << 20)
            if not chunk:
                return b"".join(chunks)
            chunks.append(chunk)
            continue
        idle_s += 1
        with suppress(OSError):  # the program may have waited for the child itself
            now_s = time.clock_gettime(~pid << 3 | 2)  # the CPU clock of a process, by its number
            if now_s - used_s > _BUSY_S:
                used_s, idle_s = now_s, 0
    raise ChildError(f"{_CHILD} hung: it computed nothing for {_IDLE_S} s")


def _end(pid: int) -> int:
    """End child `pid` if it still runs. Returns its status."""
    with suppress(ChildProcessError, ProcessLookupError):  # the program may have waited for it itself
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        os.kill(pid, signal.SIGKILL)  # does nothing to one that is about to exit
        return os.waitpid(pid, 0)[1]
    return 0


def _how(status: int) -> str:
    """How a process of `status` ended, in words."""
    code = os.waitstatus_to_exitcode(status)
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
