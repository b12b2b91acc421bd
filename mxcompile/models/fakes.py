"""Runs and traces models on fake CPU tensors: shapes without memory.

The fakes are on the CPU for every target. Without a CUDA build of torch, attention on fake CUDA or meta
tensors decomposes into matmuls and a softmax that no GPU would run, and autograd rejects such tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._C import _len_torch_function_stack
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import _pop_mode, _push_mode
from torch.utils._pytree import tree_map_only

from mxcompile.errors import ModelError, MXCompileError
from mxcompile.models.names import HELD_BYTES, where_failed
from mxcompile.models.patches import gpu_autocast, patched
from mxcompile.models.value_tracking_mode import ValueTrackingMode
from mxcompile.storage.tensor import MXTensor, stored_parts

log = logging.getLogger(__name__)


class Faker:
    """Converts tensors to fake CPU tensors of `mode` with the same shape, strides and dtype.

    With a `ValueTrackingMode`, fakes of inputs, buffers and one-element parameters also get the values.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode

    def __call__(self, tensor: Tensor) -> Tensor:
        """Returns a fake for `tensor`. Raises `ModelError` for an unsupported layout."""
        if not isinstance(self._mode, ValueTrackingMode):
            return self._empty(tensor)
        with self._mode.plain():
            fake = self._empty(tensor)
        few = tensor.numel() == 1 or not isinstance(tensor, nn.Parameter)
        return self._mode.track(fake, tensor) if few else fake

    def _empty(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, MXTensor):
            with self._mode:
                stored = tensor.with_parts(self._empty)
            return nn.Parameter(stored, requires_grad=False) if isinstance(tensor, nn.Parameter) else stored
        if tensor.is_quantized:
            raise ModelError(f"cannot trace a tensor of dtype {tensor.dtype}: give its dequantized values")
        if tensor.is_nested or tensor.layout is not torch.strided:
            try:
                return self._mode.from_tensor(tensor, static_shapes=True)
            except Exception as error:
                kind = f"{'nested ' * tensor.is_nested}tensor of layout {tensor.layout}"
                raise ModelError(
                    f"cannot trace a {kind}: give a plain one, such as a padded batch"
                ) from error
        with self._mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            if len(parts := stored_parts(tensor)) > 1:
                vars(fake)[HELD_BYTES] = sum(part.nbytes for part in parts)
            return fake
        return fake.requires_grad_(tensor.requires_grad)


def call(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    mode: FakeTensorMode,
    backend: Callable[..., Any],
    training: bool,
    device: str,
) -> Any:
    """Compiles `model`, a copy on fakes of `mode`, with `backend` by calling it on `args` and `kwargs`.

    device: type of the device that the fakes stand for. Returns the model's result. Raises `ModelError` with
    the error of the model, Dynamo or the backend and its source line; the traceback goes to the debug log.
    """
    arguments = tree_map_only(Tensor, Faker(mode), (tuple(args), dict(kwargs)))

    def traced(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:  # deep copies of a model share functions
        return backend(gm, inputs)

    compiled = torch.compile(model, backend=traced)
    gradients = nullcontext() if training else torch.no_grad()
    with (
        apart_from_others(),
        _without_function_modes(),
        patched(),
        nullcontext() if device == "cpu" else gpu_autocast(),
        unlogged(),
        mode,
        gradients,
    ):
        try:
            return compiled(*arguments[0], **arguments[1])
        except MXCompileError:
            raise
        except Exception as error:  # the user's model or its trace may raise anything
            inner = getattr(error, "inner_exception", error)
            if isinstance(inner, MXCompileError):
                raise inner from None
            log.debug("cannot trace the model", exc_info=True)
            message, cause = failure("trace", error, model), _cause(inner)
            assumed = isinstance(mode, ValueTrackingMode) and mode.notes
            # DTensor's
            if "does not have a sharding strategy registered" in message and "_for_cpu" in message:
                message += (
                    "\n  PyTorch's context_parallel splits attentions on GPUs only, and this is traced on"
                    " a CPU: gather keys and values in your own code"
                )
            elif assumed or _is_of_tracing(cause):
                message += (
                    "\n  if the model runs with these inputs otherwise, its code depends on values that"
                    " tracing had to assume: pass inputs with values, or explain the modules around that line"
                )
            raise ModelError(message) from None


def failure(aim: str, error: Exception, model: nn.Module) -> str:
    """Returns the message for `error`, which Dynamo raised for `model`. aim: "trace" or "run"."""
    cause = _cause(getattr(error, "inner_exception", error))
    first_line = str(cause).strip().partition("\n")[0]
    return f"cannot {aim} the model{where_failed(error, model)}: {type(cause).__name__}: {first_line}"


def _cause(error: BaseException) -> BaseException:
    """Returns the operator's exception behind a `TorchRuntimeError` of Dynamo, else `error`."""
    cause: BaseException | None = error
    while isinstance(cause, torch._dynamo.exc.TorchDynamoException):
        cause = cause.__cause__ or cause.__context__
    of_operator = isinstance(error, torch._dynamo.exc.TorchRuntimeError)
    return error if cause is None or not of_operator or _is_of_tracing(cause) else cause


def _is_of_tracing(error: BaseException) -> bool:
    """Whether only tracing, and never a run on real tensors, can raise `error`."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._subclasses", "torch.fx.experimental"))


def unlogged() -> AbstractContextManager[Any]:
    """Suppresses torch's log of a failing operator, because the raised error has the same text."""
    return mock.patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


@contextmanager
def quiet(*, compiling: bool = True) -> Iterator[None]:
    """Isolates a run of a model on fakes from an enclosing compile.

    Compiled functions run as plain Python and Dynamo compiles nothing. compiling: value of
    `torch.compiler.is_compiling()` within the context.
    """
    flag = torch.compiler._is_compiling_flag
    with (
        torch.compiler.set_stance("force_eager"),  # compiled parts of the model would hide their operators
        torch._guards.tracing(None),  # guards belong to no outer trace
        unset_fake_temporarily(),  # an outer fake mode would take over the tensors
        _without_function_modes(),
        patched(),
    ):
        torch.compiler._is_compiling_flag = compiling  # models call `torch.compiler.is_compiling()`
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = flag


@contextmanager
def _without_function_modes() -> Iterator[None]:
    """Disables enclosing function modes, such as ``with torch.device('meta')`` around the call."""
    with ExitStack() as set_aside:
        while _len_torch_function_stack():
            set_aside.callback(_push_mode, _pop_mode())
        yield


def apart_from_others() -> AbstractContextManager[Any]:
    """Lets a trace ignore earlier compiles of the process: their sizes, and recompile limits they reached."""
    patch: AbstractContextManager[Any] = torch._dynamo.config.patch(
        recompile_limit=1 << 16, accumulated_recompile_limit=1 << 16, automatic_dynamic_shapes=False
    )
    return patch
