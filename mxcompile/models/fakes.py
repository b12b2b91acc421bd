"""Models on fake CPU tensors: shapes without memory, for tracing what a model would do.

Fake tensors are on the CPU whatever the model is for: without a GPU build of torch an attention on fake CUDA
or meta tensors falls apart into products and a softmax that no GPU would run, and autograd refuses them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C import _len_torch_function_stack
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import _pop_mode, _push_mode
from torch.utils._pytree import tree_map_only

from mxcompile.errors import ModelError, MXCompileError
from mxcompile.models.gpu_operators import gpu_operators
from mxcompile.models.places import where_failed
from mxcompile.models.reading import values_read
from mxcompile.models.value_tracking_mode import ValueTrackingMode
from mxcompile.storage import MXTensor

log = logging.getLogger(__name__)


_SPLITS_GPUS = "does not have a sharding strategy registered"
"""What DTensor says of an operator that it cannot split."""


class Faker:
    """Tensors to fake CPU tensors of `mode`, of the same shape, strides and dtype.

    A mode that answers for values gets the values of inputs, buffers, and parameters of one number.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode

    def __call__(self, tensor: Tensor) -> Tensor:
        """A fake in the place of `tensor`."""
        if not isinstance(self._mode, ValueTrackingMode):
            return self._empty(tensor)
        with self._mode.plain():
            fake = self._empty(tensor)
        few = tensor.numel() == 1 or not isinstance(tensor, nn.Parameter)
        return self._mode.know(fake, tensor) if few else fake

    def _empty(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, MXTensor):
            with self._mode:
                stored = tensor.with_parts(self._empty)
            return nn.Parameter(stored, requires_grad=False) if isinstance(tensor, nn.Parameter) else stored
        if tensor.layout is not torch.strided:
            try:
                return self._mode.from_tensor(tensor, static_shapes=True)
            except Exception as error:
                raise ModelError(
                    f"cannot trace a tensor of layout {tensor.layout}: give a strided one, such as a padded"
                    f" batch ({type(error).__name__}: {error})"
                ) from error
        with self._mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


def call(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    mode: FakeTensorMode,
    backend: Callable[..., Any],
    training: bool,
) -> Any:
    """Compile `model`, a copy on fake tensors of `mode`, with `backend` by calling it on `args` and `kwargs`.

    Returns what the model returns. Raises `ModelError` with what the model, Dynamo or the backend met, and
    where; the traceback is logged.
    """
    arguments = tree_map_only(Tensor, Faker(mode), (tuple(args), dict(kwargs)))

    def traced(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:  # a function is never copied with its model
        return backend(gm, inputs)

    compiled = torch.compile(model, backend=traced)
    gradients = nullcontext() if training else torch.no_grad()
    with (
        apart_from_others(),
        _without_function_modes(),
        values_read(),
        gpu_operators(),
        _unlogged(),
        mode,
        gradients,
    ):
        try:
            return compiled(*arguments[0], **arguments[1])
        except MXCompileError:
            raise
        except Exception as error:  # of the user's model, or of tracing it
            inner = getattr(error, "inner_exception", error)
            if isinstance(inner, MXCompileError):
                raise inner from None
            log.debug("cannot trace the model", exc_info=True)
            raise ModelError(_message(error, inner, model, mode)) from None


def _message(error: Exception, inner: BaseException, model: nn.Module, mode: FakeTensorMode) -> str:
    """The message for `error`, which Dynamo raised for `inner` when it traced `model` under `mode`."""
    cause = _cause(inner)
    what = str(cause).strip().partition("\n")[0]
    message = f"cannot trace the model{where_failed(error, model)}: {type(cause).__name__}: {what}"
    if _SPLITS_GPUS in what and "_for_cpu" in what:
        return (
            f"{message}\n  PyTorch's context_parallel splits attentions of GPUs alone, and this is traced on"
            " a CPU: gather keys and values in code of your own"
        )
    assumed = isinstance(mode, ValueTrackingMode) and mode.notes
    if not (assumed or _is_of_tracing(cause)):
        return message
    return (
        f"{message}\n  if the model runs as it is called here, its code makes something else of values than"
        " was assumed: give inputs that have values, or explain the modules around that line"
    )


def _cause(error: BaseException) -> BaseException:
    """Returns what an operator raised, where `error` says no more than that one did; else `error`."""
    cause: BaseException | None = error
    while isinstance(cause, torch._dynamo.exc.TorchDynamoException):
        cause = cause.__cause__ or cause.__context__
    of_operator = isinstance(error, torch._dynamo.exc.TorchRuntimeError)
    return error if cause is None or not of_operator or _is_of_tracing(cause) else cause


def _is_of_tracing(error: BaseException) -> bool:
    """Whether `error` cannot come of a model that is called with real tensors."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._subclasses", "torch.fx.experimental"))


@contextmanager
def _unlogged() -> Iterator[None]:
    """Keep torch from printing the traceback of an operator that fails: the error says what it met."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def quiet(*, compiling: bool = True) -> Iterator[None]:
    """Run a model on fakes in here: apart from the compile around it, and, if `compiling`, as if compiled.

    No compiled code runs: what was compiled runs as Python, and Dynamo compiles nothing of it.
    """
    flag = torch.compiler._is_compiling_flag
    with (
        torch.compiler.set_stance("force_eager"),
        torch._guards.tracing(None),
        unset_fake_temporarily(),
        _without_function_modes(),
        values_read(),
        gpu_operators(),
    ):
        torch.compiler._is_compiling_flag = compiling  # a model asks `torch.compiler.is_compiling()`
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = flag


@contextmanager
def _without_function_modes() -> Iterator[None]:
    """Set aside a ``with torch.device("meta")`` around the call: it would reach into the traced model."""
    set_aside = []
    while _len_torch_function_stack():
        set_aside.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(set_aside):
            _push_mode(mode)


@contextmanager
def apart_from_others() -> Iterator[None]:
    """Keep what this process has compiled out of the trace: limits, sizes seen before."""
    with torch._dynamo.config.patch(
        recompile_limit=1 << 16, accumulated_recompile_limit=1 << 16, automatic_dynamic_shapes=False
    ):
        yield
