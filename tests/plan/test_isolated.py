"""`isolated`: results, errors and messages of the child, and what the child cannot reach."""

from __future__ import annotations

import io
import logging
import mmap
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import fake_tensor

from mxcompile.compiler import rehearsal
from mxcompile.errors import ModelError, OptionError
from mxcompile.models import confined
from mxcompile.models.isolated import ChildError, NoChildError, isolated

log = logging.getLogger("mxcompile.test")


def raising(error: BaseException) -> Callable[[], Any]:
    def function() -> None:
        raise error

    return function


def test_a_result_comes_back_and_its_making_does_not():
    seen = []
    assert isolated(lambda: (seen.append(1), list(range(200_000)))[1]) == list(range(200_000))
    assert seen == []
    assert isolated(lambda: isolated(os.getpid) == os.getpid())
    assert isolated(os.getpid) != os.getpid()


def test_errors_keep_their_class_and_text_or_become_model_errors():
    with pytest.raises(OptionError, match=r"^no such option$"):
        isolated(raising(OptionError("no such option")))
    with pytest.raises(ModelError, match=r"ZeroDivisionError: first line$"):
        isolated(raising(ZeroDivisionError("first line\nsecond")))
    with pytest.raises(ModelError, match="SystemExit: 3"):
        isolated(raising(SystemExit(3)))
    with pytest.raises(ModelError, match="KeyError"):
        isolated(lambda: isolated(raising(KeyError("nested"))))
    with pytest.raises(ModelError, match="pickle"):
        isolated(threading.Lock)


def test_child_that_ends_itself_raises_error_with_code_or_signal():
    with pytest.raises(ChildError, match="exit code 0"):
        isolated(lambda: os._exit(0))
    with pytest.raises(ChildError, match="killed by SIGABRT"):
        isolated(os.abort)


def test_a_child_that_computes_forever_is_killed(monkeypatch):
    monkeypatch.setattr(confined, "_CPU_S", 1)

    def spin() -> None:
        while True:
            pass

    with pytest.raises(ChildError, match="killed by SIGXCPU"):
        isolated(spin)


def test_rehearsal_without_fork_runs_in_the_process_with_a_warning(monkeypatch, caplog):
    def fork() -> int:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(NoChildError, match="no more processes"):
        isolated(int)
    assert rehearsal.apart(os.getpid) == os.getpid()
    assert any("no more processes" in message for message in caplog.messages)


def test_a_rehearsal_runs_here_where_a_child_has_no_autograd(monkeypatch, caplog):
    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork")

    monkeypatch.setattr(torch.autograd, "grad", refused)
    assert rehearsal.apart(os.getpid) == os.getpid()
    assert any("cannot compute gradients" in message for message in caplog.messages)


def test_libraries_are_heard_and_the_program_is_not(caplog):
    def forward() -> None:
        log.info("planned %d layers", 3)
        logging.getLogger("model").info("called")
        warnings.warn("of the model", stacklevel=1)

    with caplog.at_level(logging.INFO), warnings.catch_warnings():
        warnings.simplefilter("default")
        isolated(forward, tools=True)
    assert [(record.name, record.getMessage()) for record in caplog.records] == [
        ("mxcompile.test", "planned 3 layers")
    ]
    code = compile("import warnings; warnings.warn('of torch')", f"{torch.__path__[0]}/nn/a.py", "exec")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        with pytest.warns(UserWarning, match="of torch"):
            isolated(lambda: exec(code, {}), tools=True)


def test_files_that_are_open_stay_where_they_are(tmp_path: Path):
    path = tmp_path / "lines"
    path.write_bytes(b"".join(b"%06d\n" % number for number in range(10_000)))
    with path.open("rb", buffering=0) as raw, path.open("ab", buffering=0) as end, path.open() as lines:
        raw.read(7), next(lines)

        def forward() -> tuple[bytes, str, int]:
            return raw.read(7), next(lines), end.write(b"more")

        assert isolated(forward) == (b"000001\n", "000001\n", 4)
        assert forward() == (b"000001\n", "000001\n", 4)
    assert path.stat().st_size == 70_004


def test_isolated_function_cannot_write_files(tmp_path: Path):
    kept = tmp_path / "kept"
    kept.write_text("old")

    def forward() -> None:
        for mode in "wax":
            with open(tmp_path / "new", mode) as file:  # noqa: PTH123 - one of the ways
                file.write("new")
        kept.write_text("new")
        os.close(os.open(tmp_path / "new", os.O_WRONLY | os.O_CREAT))
        os.makedirs(tmp_path / "folder" / "inner")  # noqa: PTH103
        kept.unlink()
        kept.rename(tmp_path / "new")
        torch.save(torch.zeros(2), tmp_path / "new.pt")
        np.save(tmp_path / "new.npy", np.zeros(2))
        sys.stdout.write("new")
        content = io.BytesIO()
        torch.save(torch.ones(2), content)
        assert torch.load(io.BytesIO(content.getvalue())).tolist() == [1, 1]

    isolated(forward)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"kept": "old"}


def test_write_through_libc_is_refused_in_a_child(tmp_path: Path):
    kept = tmp_path / "kept"
    kept.write_text("old")

    def forward() -> int:
        import ctypes

        libc = ctypes.CDLL(None)
        return int(libc.write(libc.open(bytes(kept), os.O_WRONLY | os.O_APPEND), b"new", 3))

    assert isolated(forward) == -1
    assert kept.read_text() == "old"


@pytest.mark.parametrize(
    "act",
    [
        lambda: subprocess.run([sys.executable, "-c", ""], check=False),
        lambda: os.system("true"),
        lambda: os.kill(os.getppid(), 0),
        os.fork,
        lambda: socket.create_connection(("127.0.0.1", 9)),
    ],
    ids=["subprocess", "system", "kill", "fork", "socket"],
)
def test_processes_and_sockets_are_refused(act: Callable[[], Any]):
    with pytest.raises(ModelError, match="PermissionError"):
        isolated(act)


def test_memory_that_processes_share_is_a_copy(monkeypatch):
    value, tensor, region = multiprocessing.Value("i", 1), torch.zeros(4).share_memory_(), mmap.mmap(-1, 4096)

    def forward() -> tuple[int, list[float], bytes]:
        with value.get_lock():
            value.value += 1
        tensor.add_(1)
        region[:3] = b"new"
        return value.value, tensor.tolist(), region[:3]

    assert isolated(forward) == (2, [1, 1, 1, 1], b"new")
    assert (value.value, tensor.tolist(), region[:3]) == (1, [0, 0, 0, 0], bytes(3))
    monkeypatch.setattr(confined, "_COPIED_BYTES", 1024)
    assert isolated(lambda: region[:3]) == bytes(3)
    with pytest.raises(ChildError, match="SIGSEGV"):
        isolated(forward)


def test_random_numbers_are_those_that_the_program_draws_next():
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    assert isolated(draw) == draw()


def test_cuda_is_not_touched_and_answers_as_before_the_fork(monkeypatch):
    parent = os.getpid()

    def answer(value: Any) -> Callable[..., Any]:
        def value_in_parent(*_: Any) -> Any:
            assert os.getpid() == parent, "CUDA does not work after a fork"
            return value

        return value_in_parent

    monkeypatch.setattr(torch.cuda, "is_initialized", answer(True))
    for name in confined._CUDA:
        monkeypatch.setattr(torch.cuda, name, answer(name))
    monkeypatch.setattr(fake_tensor, "init_gpu_context", answer(None))

    def forward() -> list[str]:
        fake_tensor.init_gpu_context(torch.device("cuda"))
        return [getattr(torch.cuda, name)() for name in confined._CUDA]

    assert isolated(forward) == list(confined._CUDA)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_child_compiles_where_the_program_wants_no_gradients(mode: Callable[[], Any]):
    with mode():
        assert isolated(lambda: "compiled", tools=True) == "compiled"


AFTER_FAKES = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from mxcompile.models.isolated import isolated

with FakeTensorMode():
    torch.empty(1)
torch.zeros((), requires_grad=True).mul(1).backward()
print(isolated(lambda: "compiled", tools=True))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a gradient starts threads for the devices")
def test_a_child_compiles_after_fake_tensors_and_a_gradient():
    """A PyTorch with CUDA and without a device has fake devices then, and threads of autograd for those."""
    command = [sys.executable, "-c", AFTER_FAKES]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "compiled\n"
