"""Confines a forked child to its own memory, and replaces resources that a fork breaks.

    open files         reopened read-only at the same offset, so that the parent's offset does not move
    files to write     /dev/null; directories are not created, files not removed
    processes, sockets `PermissionError`
    shared memory      a private copy; a large region becomes read-only
    CUDA, threads      cached answers of CUDA from before the fork; one thread

Native code that opens files itself is not caught: its writes fail, but an empty file may remain. Needs /proc,
and therefore Linux.
"""

from __future__ import annotations

import builtins
import ctypes
import fcntl
import io
import os
import random
import resource
import signal
import stat
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PROT_READ, PROT_WRITE
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import fake_tensor

_CPU_S = 600
"""CPU limit of the child in seconds. A loop on fake tensors may wait forever for a value."""
_COPIED_BYTES = 1 << 26
"""Size of the largest region of shared memory that is copied."""
_MAP_FIXED, _PR_SET_PDEATHSIG = 0x10, 1
_CHANGES = frozenset(
    [
        "os.chmod", "os.chown", "os.exec", "os.fork", "os.forkpty", "os.kill", "os.killpg", "os.link",
        "os.lockf", "os.mkdir", "os.posix_spawn", "os.remove", "os.removexattr", "os.rename", "os.rmdir",
        "os.setxattr", "os.spawn", "os.symlink", "os.system", "os.truncate", "os.utime", "pty.spawn",
        "signal.pthread_kill", "socket.bind", "socket.connect", "socket.sendmsg", "socket.sendto",
        "sqlite3.connect", "subprocess.Popen", "syslog.syslog",
    ]
)  # fmt: skip
"""Audit events that raise `PermissionError` in a child."""
_OF_FILES = "chmod", "link", "mkdir", "remove", "rename", "replace", "rmdir", "symlink", "truncate", "unlink"
"""Functions of `os` that do nothing in a child."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CUDA = (
    "current_device", "get_device_capability", "get_device_name", "get_device_properties", "is_bf16_supported"
)  # fmt: skip
"""Functions of `torch.cuda` whose answers are cached, because CUDA does not work after a fork."""
_TOOLS = tuple(
    str(Path(spec.origin).parent)
    for name in ("mxcompile", "torch", "triton", "filelock")
    if (spec := find_spec(name)) is not None and spec.origin is not None
)
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


@dataclass(frozen=True, kw_only=True, slots=True)
class Before:
    """The parent's state that the fork changes: the random generator and the answers of CUDA."""

    random: Any
    cuda: dict[str, Any]

    @classmethod
    def now(cls) -> Before:
        """Returns the state of this process."""
        names = _CUDA if torch.cuda.is_initialized() else ()
        return cls(random=random.getstate(), cuda={name: getattr(torch.cuda, name)() for name in names})


def confine(before: Before, sink: int, *, tools: bool) -> None:
    """Confines this process, a newly forked child.

    before: state of the parent before the fork. sink: file descriptor of the result pipe, which stays open.
    tools: whether torch and Triton may write their caches and start compilers.
    """
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    _limit(resource.RLIMIT_CPU, _CPU_S)
    _limit(resource.RLIMIT_CORE, 0)
    if not tools:
        _limit(resource.RLIMIT_FSIZE, 0)
    _replace_descriptors(sink)
    _copy_shared_memory(libc)
    sys.stdin, sys.stdout, sys.stderr = (Path(os.devnull).open(mode) for mode in "rww")  # noqa: SIM115
    sys.dont_write_bytecode = True
    _guard_files(tools=tools)
    torch.set_num_threads(1)  # a fork has no threads of libgomp, and libgomp would wait for them
    random.setstate(before.random)
    for name, answer in before.cuda.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    vars(fake_tensor)["init_gpu_context"] = lambda _: None  # CUDA cannot start in a fork


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _replace_descriptors(sink: int) -> None:
    """Reopens every readable file on disk read-only; all other descriptors become /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if descriptor in (sink, null):
            continue
        replacement = null
        with suppress(OSError):
            is_read = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
            mode = os.fstat(descriptor).st_mode
            if is_read and descriptor > 2 and (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                replacement = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
                os.lseek(replacement, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(replacement, descriptor)
        if replacement != null:
            os.close(replacement)


def _copy_shared_memory(libc: ctypes.CDLL) -> None:
    """Replaces every writable shared mapping by a private copy."""
    libc.mmap.restype = ctypes.c_void_p
    for line in Path("/proc/self/maps").read_text().splitlines():
        region, access, _, _, _, path = [*line.split(maxsplit=5), ""][:6]
        is_device = path.startswith("/dev/") and not path.startswith(("/dev/shm/", "/dev/zero"))
        if access[1] != "w" or access[3] != "s" or is_device:
            continue
        start, end = (int(bound, 16) for bound in region.split("-"))
        address, size = ctypes.c_void_p(start), ctypes.c_size_t(end - start)
        if size.value > _COPIED_BYTES:  # too large to copy: a write ends the child
            libc.mprotect(address, size, PROT_READ)
            continue
        content = ctypes.string_at(start, size.value)
        kind = MAP_PRIVATE | MAP_ANONYMOUS | _MAP_FIXED
        libc.mmap(address, size, PROT_READ | PROT_WRITE, kind, -1, ctypes.c_long(0))
        ctypes.memmove(start, content, size.value)


def _guard_files(*, tools: bool) -> None:
    """Redirects writes to /dev/null and refuses all other changes."""

    def is_free() -> bool:
        return tools and is_tool(_caller())

    def refuse(event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and args[0] != os.devnull and bool((args[2] or 0) & _WRITES)
        if (writes or event in _CHANGES) and not is_free():
            raise PermissionError(
                f"{event} is not allowed here: mxcompile runs the model on fake tensors, without side effects"
            )

    own_open, own_os_open, own_save = builtins.open, os.open, torch.save

    def open_file(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, int) or not set(mode) & set("wax+") or is_free():
            return own_open(file, mode, *args, **kwargs)
        kwargs.pop("opener", None)
        return own_open(os.devnull, mode.replace("x", "w"), *args, **kwargs)

    def open_descriptor(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if not flags & _WRITES or is_free():
            return own_os_open(path, flags, *args, **kwargs)
        return own_os_open(os.devnull, flags & os.O_ACCMODE)

    def save(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(file, str | os.PathLike):  # torch.save opens a path in C++, past `open_file`
            own_save(value, file, *args, **kwargs)

    def or_nothing(change: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: change(*args, **kwargs) if is_free() else None

    builtins.open = io.open = open_file
    os.open = open_descriptor
    torch.save = save  # type: ignore[assignment]
    for name in _OF_FILES:
        setattr(os, name, or_nothing(getattr(os, name)))
    sys.addaudithook(refuse)


def is_tool(path: str) -> bool:
    """Whether the file at `path` belongs to mxcompile or to a compiling library."""
    return path.startswith(_TOOLS)


def _caller() -> str:
    """Returns the file of the innermost function outside the standard library and this file."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path: str = frame.f_code.co_filename
        is_standard = path.startswith(("<", _STANDARD_LIBRARY)) and "-packages/" not in path
        if path != __file__ and not is_standard:
            return path
        frame = frame.f_back
    return ""
