"""Fake tensors that track values computed from the model's inputs, and assume all other values.

    input_ids, masks, grids, arange, …   tracked: values are stored beside the fakes and computed with them
    all_to_all of tracked values         assumed: other ranks send the same values
    topk, sort, argmax of unknown ones   assumed: spread evenly over the choices (balanced experts)
    nonzero, masks of unknown ones       assumed: every element counts
    item of unknown ones                 assumed: False, 1 or 1.0

A model whose code reads values (``.item()``, ``nonzero``, a loop over the chosen experts) can therefore be
traced on fakes. Values that depend on parameters or activations are assumed, and every assumption that
influences the trace is listed in `ValueTrackingMode.notes`. Within Dynamo and AOTAutograd values stay
unknown, so that graphs break at the same lines as in a compile.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from traceback import walk_stack
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map_only

from mxcompile.models.names import user_path, where
from mxcompile.models.outside import Outside
from mxcompile.models.tree import strays

aten = torch.ops.aten

LIMIT = 1 << 24
"""Elements of the largest tensor whose values are tracked."""
_CHOICES = {
    aten.topk.default: 2, aten.sort.default: 1, aten.sort.stable: 2, aten.argmax.default: 1,
    aten.argmin.default: 1, aten.max.dim: 1, aten.min.dim: 1, aten.multinomial.default: None,
}  # fmt: skip
"""Operators that choose indices, with the position of their argument `dim`, or None for the last dim."""
_FLAT = frozenset({aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim})
_COLLECTIVES = torch.ops._c10d_functional
_EMPTY = frozenset({aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.empty_permuted})
_VALUE = "_mx_value"
_PATIENCE = 64
"""After this many False answers at one line the answer is True, because a loop may wait for it."""


@dataclass(frozen=True, slots=True)
class _Value:
    """The tracked values of a fake tensor. assumed: one sentence for each underlying assumption."""

    tensor: Tensor
    assumed: frozenset[str] = frozenset()


class ValueTrackingMode(FakeTensorMode):
    """A fake mode that tracks values. outside: collects the matmuls that run under the mode."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.outside = Outside()
        self._notes: dict[str, None] = {}
        self._answers: Counter[str] = Counter()
        self._stale: dict[int, Any] = {}
        self._plain = 0
        self._paths: dict[int, str] = {}
        self._classes: dict[str, str] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """The assumptions that influenced the trace, a sentence each."""
        return tuple(self._notes)

    def names(self, model: nn.Module) -> None:
        """Sets the model whose paths appear in notes and in the records of products."""
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._classes = {path: type(module).__qualname__ for path, module in model.named_modules()}
        for path, value in (*model.named_parameters(remove_duplicate=False), *strays(model)):
            if isinstance(value, Tensor):
                self.outside.add(value, user_path(path))
            else:
                self._paths[id(value)], self._classes[path] = path, type(value).__qualname__

    def track(self, fake: Tensor, real: Tensor) -> Tensor:
        """Returns `fake` with the values of `real`, if `real` is tracked, or is a small tensor on the CPU."""
        if isinstance(real, FakeTensor):
            value = real.fake_mode._value(real) if isinstance(real.fake_mode, ValueTrackingMode) else None
            if value is not None:
                setattr(fake, _VALUE, value)
            return fake
        plain = type(real) in (Tensor, nn.Parameter, nn.Buffer) and real.layout is torch.strided
        if plain and real.device.type == "cpu" and real.numel() <= LIMIT:
            setattr(fake, _VALUE, _Value(real.detach().clone()))
        return fake

    @contextmanager
    def plain(self, sizes: ShapeEnv | None = None) -> Iterator[None]:
        """Disables value tracking within the context. sizes: `ShapeEnv` for data-dependent sizes."""
        before = self.shape_env
        self.shape_env = sizes or before
        self._plain += 1
        try:
            yield
        finally:
            self._plain -= 1
            self.shape_env = before

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs `func` on fakes, and on their values if all are tracked."""
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._called(func, args, kwargs)
        if self.in_kernel_invocation or self._plain or TracingContext.try_get() is not None:
            return super().dispatch(func, types, args, kwargs)
        if not self._paths:
            return self._answered(func, types, args, kwargs)
        takes = self.outside.takes(func)
        with self.outside.paused() if takes else nullcontext():  # parts of a product
            result = self._answered(func, types, args, kwargs)
        self.outside.follow(func, args, result)
        node = self.outside.note(func, args, kwargs, result) if takes else None
        if node is not None:
            path, source = self._where()
            file, _, line = source.rpartition(":")
            node.meta["nn_module_stack"] = {"": (path, self._classes.get(path, ""))}
            node.meta["stack_trace"] = f'File "{file}", line {line}'
        return result

    def _called(self, func: HigherOrderOperator, args: Any, kwargs: Any) -> Any:
        """Returns the result of the higher-order operator `func` on fakes.

        Torch registers fake rules under `FakeTensorMode` itself and does not find them for a subclass.
        """
        rules: Any = func.python_key_table
        fake_functions: Any = registered_hop_fake_fns
        sizes = self.shape_env or ShapeEnv()  # for sizes that a loop decides
        with mock.patch.object(self, "shape_env", sizes):
            if FakeTensorMode in rules and func not in fake_functions:
                return rules[FakeTensorMode](self, *args, **kwargs)
            return super().dispatch(func, (), args, kwargs)  # type: ignore[arg-type]

    def _answered(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        values = [self._value(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        has_values = all(value is not None for value in values)
        assumed = frozenset[str]().union(*(value.assumed for value in values if value is not None))
        if func is aten._local_scalar_dense.default:
            return self.scalar(args[0])
        if func.namespace == _COLLECTIVES.name and func is not _COLLECTIVES.wait_tensor.default:
            result = self._on_fakes(func, types, args, kwargs)
            value = values[0] if func is _COLLECTIVES.all_to_all_single.default else None
            if value is not None and result.shape == args[0].shape:
                same = self._assumed("all_to_all_single: other ranks send the same values as this rank")
                setattr(result, _VALUE, _Value(value.tensor, value.assumed | same))
            return result
        if not has_values or torch.Tag.nondeterministic_seeded in func.tags:
            return self._on_fakes(func, types, args, kwargs)
        try:
            result = super().dispatch(func, types, args, kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            self._note(assumed)
            return self._fakes_of(self._run(func, args, kwargs), assumed)
        if all(leaf.numel() <= LIMIT for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            reals = tree_leaves(self._run(func, args, kwargs))
            for fake, real in zip(tree_leaves(result), reals, strict=True):
                are_tensors = isinstance(fake, FakeTensor) and isinstance(real, Tensor)
                if are_tensors and real.layout == torch.strided and fake.shape == real.shape:
                    setattr(fake, _VALUE, _Value(real, assumed))
        elif func._schema.is_mutable:
            self._forget(func, args, kwargs)
        return result

    def _on_fakes(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Runs `func` with unknown values. Chosen indices and value-dependent sizes are assumed."""

        def stand_in(leaf: Tensor) -> Tensor:  # without values a scalar 1, expanded
            value = self._value(leaf)
            return value.tensor if value else torch.ones((), dtype=leaf.dtype).expand(leaf.shape)

        picked = self._with_numbers(func, args)
        if picked is not args:
            func = aten.index.Tensor
        if func._schema.is_mutable:
            self._forget(func, args, kwargs)
        try:
            result = super().dispatch(func, types, picked, kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            self._note(self._assumed(f"{_name(func)} of computed values: true for every element"))
            result = func(*tree_map_only(Tensor, stand_in, args), **kwargs)
            return self._fakes_of(result, frozenset())
        if func in _CHOICES:
            self._spread(func, args, result)
        return result

    def _value(self, tensor: Tensor) -> _Value | None:
        if not isinstance(tensor, FakeTensor):
            return _Value(tensor) if type(tensor) in (Tensor, nn.Parameter) else None
        value: _Value | None = getattr(tensor, _VALUE, None)
        if value is None or value.tensor.untyped_storage()._cdata in self._stale:
            return None
        return value

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        def real(leaf: Tensor) -> Tensor:
            value = self._value(leaf)
            assert value is not None
            return value.tensor

        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": "cpu"}
        args = tree_map_only(Tensor, real, args)
        with torch.no_grad():
            if func is aten.histc.default:  # the CPU kernel takes no integers
                result = func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
            else:
                result = func(*args, **tree_map_only(Tensor, real, kwargs))
        if func._overloadpacket in _EMPTY:
            result.zero_()
        return result

    def _fakes_of(self, reals: Any, assumed: frozenset[str]) -> Any:
        def fake(leaf: Tensor) -> Tensor:
            with self, self.plain():
                fake_leaf = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
            if leaf.numel() <= LIMIT:
                setattr(fake_leaf, _VALUE, _Value(leaf, assumed))
            return fake_leaf

        return tree_map_only(Tensor, fake, reals)

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """Drops the values of tensors that `func` writes to, and of all their views."""
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            operand = args[position] if position < len(args) else kwargs.get(argument.name)
            for leaf in tree_leaves(operand):
                value = self._value(leaf) if isinstance(leaf, Tensor) else None
                if value is not None:
                    storage = value.tensor.untyped_storage()
                    self._stale[storage._cdata] = storage

    def values(self, fake: FakeTensor) -> Tensor:
        """Returns the values of `fake`. Unknown values are 1, or False for booleans."""
        if (value := self._value(fake)) is None:
            taken = fake.dtype is not torch.bool
            number = int(taken) if taken else False
            self._note(self._assumed(f"computed values that the code reads: all {number}"))
            return torch.full(fake.shape, taken, dtype=fake.dtype)
        self._note(value.assumed)
        return value.tensor

    def scalar(self, tensor: Tensor) -> Any:
        """Returns the number in `tensor`, or an assumed number."""
        if (value := self._value(tensor)) is not None:
            self._note(value.assumed)
            return value.tensor.item()
        location = self._location()
        self._answers[location] += 1
        if tensor.dtype is torch.bool:
            answer: Any = self._answers[location] % _PATIENCE == 0
        else:
            answer = 1.0 if tensor.dtype.is_floating_point else 1
        self._note(self._assumed(f"a computed value that the code reads: {answer}"))
        return answer

    def _with_numbers(self, func: Any, args: Any) -> Any:
        """Returns the arguments of `func` with boolean masks converted to index tensors."""
        if func not in (aten.index.Tensor, aten.masked_select.default):
            return args
        numbers = args[1]
        if func is aten.masked_select.default:
            args = torch.broadcast_tensors(*args[:2])
            numbers = [args[1]]
        if not any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in numbers):
            return args
        indices: list[Any] = []
        for index in numbers:
            if not (isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)):
                indices.append(index)
                continue
            if (value := self._value(index)) is None:
                self._note(self._assumed("a computed mask: true everywhere"))
                value = _Value(torch.ones(index.shape, dtype=torch.bool))
            self._note(value.assumed)
            indices += self._fakes_of(value.tensor.bool().nonzero(as_tuple=True), value.assumed)
        return (args[0], indices, *args[2:])

    def _spread(self, func: Any, args: Any, result: Any) -> None:
        """Sets the chosen indices in `result` to values that occur equally often."""
        indices = result[-1] if isinstance(result, tuple | list) else result
        position = _CHOICES[func]
        usual = None if func in (aten.argmax.default, aten.argmin.default) else -1
        dim = args[position] if position is not None and position < len(args) else usual
        if indices.numel() > LIMIT or args[0].ndim == 0:
            return
        size = args[0].numel() if dim is None else args[0].shape[dim]
        last = [*indices.shape]
        if dim is not None and func not in _FLAT:
            last.append(last.pop(dim))
        if func in (aten.sort.default, aten.sort.stable):
            values = torch.arange(size).expand(last)
        else:
            values = torch.arange(indices.numel()).remainder(size).view(last)
        if values.shape != indices.shape:
            values = values.movedim(-1, dim or 0)
        even = self._assumed(f"{_name(func)} of computed values: spread evenly over its {size} choices")
        setattr(indices, _VALUE, _Value(values.contiguous(), even))

    def _note(self, sentences: frozenset[str]) -> None:
        self._notes.update(dict.fromkeys(sorted(sentences)))

    def _assumed(self, sentence: str) -> frozenset[str]:
        """Returns the assumption `sentence`, with the place in the model's code."""
        return frozenset({f"{sentence} ({self._location()})"})

    def _where(self) -> tuple[str, str]:
        return where(walk_stack(sys._getframe(1)), self._paths)

    def _location(self) -> str:
        return ", ".join(part for part in self._where() if part)

    def module(self) -> str:
        """Returns the path of the innermost running module."""
        return self._where()[0]


def _name(func: Any) -> str:
    return str(func._overloadpacket).removeprefix("aten.")
