"""Runs a function of the user's program without side effects, in a forked child that returns the result.

    fork ─▶ child: confined, function(), pickled result ─▶ pipe ─▶ result, log records
         └▶ parent: waits, and kills a child that hangs

The child has copies of all objects: globals, closures, classes, hooks, iterators and random generators of the
parent stay unchanged. `confined` isolates the child from everything else: files, processes, sockets, shared
memory. An exit, a crash or a hang of the child becomes a `ModelError` in the parent.
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
"""Calls that repeat the child's log records and warnings in the parent."""

log = logging.getLogger(__name__)

_IDLE_S, _BUSY_S = 30, 0.1
"""Idle and busy limits in seconds: a child hangs if it computes less than `_BUSY_S` during `_IDLE_S`."""
_LIBRARIES = ("mxcompile", "torch")
"""Loggers whose records reach the parent. User code logs again when it really runs."""
_PLAIN = (str, int, float, type(None))
_CHILD = "the process that runs the model on fake tensors"
_TOKENIZERS = "TOKENIZERS_PARALLELISM"

_IN_CHILD: ContextVar[bool] = ContextVar("_IN_CHILD", default=False)


class ChildError(ModelError):
    """The child process that runs a model on fake tensors crashed or hung."""


class _HungError(ChildError):
    """The child process computes nothing."""


class NoChildError(ChildError):
    """The child process cannot be started."""


def isolated(function: Callable[[], Result], *, tools: bool = False) -> Result:
    """Returns the result of `function`, called in a child process; within a child, called directly.

    The result must be picklable, and `function` must not need an accelerator. tools: whether it compiles:
    torch and Triton then write their caches and start compilers, and autograd must work in the child.

    Raises `NoChildError` if no child can start, `ChildError` if the child crashed or two of them hung, an
    `MXCompileError` of `function`, and `ModelError` for any other exception of `function`.
    """
    if _IN_CHILD.get():
        try:
            return function()
        except BaseException as error:
            raise _as_own_error(error) from error
    try:
        answer, status = _answer(function, tools=tools)
    except _HungError:  # maybe another thread held a lock at the fork, which stays locked in the child
        answer, status = _answer(function, tools=tools)
    try:
        outcome, messages = pickle.loads(answer)
    except Exception as error:  # the child ended early: the answer is empty or cut
        code = os.waitstatus_to_exitcode(status)
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise ChildError(f"{_CHILD} ended without a result: {how}") from error
    for show in messages:
        show()
    if isinstance(outcome, MXCompileError):
        raise outcome
    result: Result = outcome[0]
    return result


def _answer(function: Callable[[], Any], *, tools: bool) -> tuple[bytes, int]:
    """Returns the pickled result of `function` from a child, and the exit status of the child."""
    source, sink = os.pipe()
    try:
        pid = _fork(function, sink, tools=tools)
    except BaseException:
        os.close(source)
        raise
    finally:
        os.close(sink)
    try:
        answer = _read_result(source, pid)
    finally:
        os.close(source)
        status = _end(pid)
    return answer, status


def _fork(function: Callable[[], Any], sink: int, *, tools: bool) -> int:
    """Starts the child, which writes the result of `function` to `sink`. Returns its pid."""
    before = Before.now()
    quiet = "tokenizers" in sys.modules and _TOKENIZERS not in os.environ  # it would warn of each fork
    if quiet:
        os.environ[_TOKENIZERS] = "false"
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # keep handlers out of the child
    try:
        # a lock that another thread holds at the fork stays locked in the child forever
        with compile_lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of a fork with threads
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
    """Runs in the child: writes the pickled result of `function` to `sink` and exits."""
    try:
        messages: Messages = []
        try:
            _IN_CHILD.set(True)
            gc.freeze()  # finalizers of the parent's garbage must not run here
            _collect_logs(messages, tools=tools)
            confine(before, sink, tools=tools)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if tools:
                _check_autograd()
            answer = pickle.dumps(((function(),), messages))
        except BaseException as error:  # a forward may raise SystemExit
            answer = pickle.dumps((_as_own_error(error), messages))
        rest = memoryview(answer)
        while rest:
            rest = rest[os.write(sink, rest) :]
    finally:
        os._exit(0)


def _check_autograd() -> None:
    """Raises `NoChildError` if autograd had threads in the parent, because a fork has no threads."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            leaf = torch.zeros((), device="cpu", requires_grad=True)
            torch.autograd.grad(leaf * 1, leaf)
    except RuntimeError as error:
        raise NoChildError(f"{_CHILD} cannot compute gradients: {error}") from error


# The first gradient starts an autograd thread per device. On a machine without GPU `FakeTensorMode` pretends
# that CUDA has 8 devices, and these threads would break every later fork: start them now, for the CPU alone.
if torch.backends.cuda.is_built() and not torch.cuda.device_count():
    with suppress(NoChildError):  # this process is itself a fork of one with autograd threads
        _check_autograd()


def _as_own_error(error: BaseException) -> MXCompileError:
    """Returns `error` if it is an `MXCompileError`, else a `ModelError` with its message."""
    if isinstance(error, MXCompileError):
        return error
    log.debug("cannot run the model on fake tensors", exc_info=error)
    first_line = str(error).strip().partition("\n")[0]
    return ModelError(f"cannot run the model on fake tensors: {type(error).__name__}: {first_line}")


def _collect_logs(messages: Messages, *, tools: bool) -> None:
    """Collects the log records of `_LIBRARIES` in `messages`, and their warnings if `tools`."""

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


def _read_result(source: int, pid: int) -> bytes:
    """Reads the result of child `pid` from the pipe `source`. Raises `_HungError` if the child hangs."""
    chunks: list[bytes] = []
    ready = select.poll()
    ready.register(source, select.POLLIN)
    used_s, idle_s = 0.0, 0  # a wall clock would count time in which both processes are stopped
    while idle_s < _IDLE_S:
        if ready.poll(1000):
            if not (chunk := os.read(source, 1 << 20)):
                return b"".join(chunks)
            chunks.append(chunk)
            continue
        idle_s += 1
        with suppress(OSError):  # the program itself may have reaped the child
            now_s = time.clock_gettime(~pid << 3 | 2)  # Linux's id of the CPU clock of a process
            if now_s - used_s > _BUSY_S:
                used_s, idle_s = now_s, 0
    raise _HungError(f"{_CHILD} hung: it used no CPU time for {_IDLE_S} s")


def _end(pid: int) -> int:
    """Kills child `pid` if it still runs. Returns its exit status."""
    with suppress(ChildProcessError, ProcessLookupError):  # the program itself may have reaped it
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        os.kill(pid, signal.SIGKILL)  # harmless if the child is about to exit
        return os.waitpid(pid, 0)[1]
    return 0
