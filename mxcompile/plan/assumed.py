"""Fake tensors that know their values where these follow from the model's inputs, and assume them elsewhere.

    input_ids, masks, grids, arange, …   their values are kept beside the fakes and computed on
    topk, sort, argmax of computed       taken to spread evenly over their choices: balanced experts
    nonzero, masks, item of computed     every element counts; False, 1, 1.0

A model whose code asks for values (``.item()``, ``nonzero``, a loop over the experts chosen) can then be
traced on fakes past that point. Values that only parameters and activations decide are assumed; every
assumption that something was decided by is noted in `Assuming.notes`. Inside of Dynamo and AOTAutograd such
code raises as it does with any fake tensor, so that graphs break where they do in a compile.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from mxcompile.graph.opaque import weights_sizes
from mxcompile.graph.opsets import OPAQUE

aten = torch.ops.aten

LIMIT = 1 << 24
"""Elements of the largest tensor whose values are kept."""
_CHOICES = {
    aten.topk.default: 2, aten.sort.default: 1, aten.sort.stable: 2, aten.argmax.default: 1,
    aten.argmin.default: 1, aten.max.dim: 1, aten.min.dim: 1, aten.multinomial.default: None,
}  # fmt: skip
"""Operators that choose by value, and where their argument `dim` is; None: always the last."""
_EMPTY = frozenset({aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.empty_permuted})
_VALUE = "_mx_value"
_OUTSIDE = tuple(f"{Path(module.__file__ or '').parent}/" for module in (torch, sys.modules["mxcompile"]))
_PATIENCE = 64
"""After how many equal answers at one line the other is given: a loop may wait for it."""


@dataclass(frozen=True, slots=True)
class _Value:
    """What a fake tensor holds. assumed: sentences on what that rests on."""

    tensor: Tensor
    assumed: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class EagerProduct:
    """A matrix product that ran outside of compiled graphs. path: of its module. flops: of the forward."""

    operator: str
    flops: int
    path: str
    source: str


@dataclass(eq=False)
class _State:
    notes: dict[str, None] = field(default_factory=dict)
    products: list[EagerProduct] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    stale: dict[int, Any] = field(default_factory=dict)
    compiled: int = 0
    plain: int = 0


class Assuming(FakeTensorMode):
    """A fake mode that answers what a model's code asks of values."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._state = _State()
        self._paths: dict[int, str] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What was assumed where something was decided by it, a sentence each."""
        return tuple(self._state.notes)

    @property
    def products(self) -> tuple[EagerProduct, ...]:
        """The matrix products that ran outside of compiled graphs."""
        return tuple(self._state.products)

    def names(self, model: nn.Module) -> None:
        """Say where things happen by the paths of `model`."""
        self._paths = {id(module): path for path, module in model.named_modules()}

    def know(self, fake: Tensor, real: Tensor) -> Tensor:
        """`fake`, which from now on has the values of `real` if these are at hand and not too many."""
        plain = type(real) in (Tensor, nn.Parameter, nn.Buffer) and real.layout is torch.strided
        if plain and real.device.type == "cpu" and real.numel() <= LIMIT and not isinstance(real, FakeTensor):
            setattr(fake, _VALUE, _Value(real.detach().clone()))
        return fake

    @contextmanager
    def inside_graph(self) -> Iterator[None]:
        """What runs in here is a compiled graph: its products are in the report already."""
        self._state.compiled += 1
        try:
            yield
        finally:
            self._state.compiled -= 1

    @contextmanager
    def plain(self) -> Iterator[None]:
        """In here this is a fake mode like any other."""
        self._state.plain += 1
        try:
            yield
        finally:
            self._state.plain -= 1

    # -- dispatch --------------------------------------------------------------------------------

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` on fakes, and on their values where these are known."""
        kwargs = kwargs or {}
        if self.in_kernel_invocation or self._state.plain or TracingContext.try_get() is not None:
            return super().dispatch(func, types, args, kwargs)
        result = self._answered(func, types, args, kwargs)
        if not self._state.compiled:
            self._note_product(func, args, kwargs, result)
        return result

    def _answered(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        values = [self._value(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = all(value is not None for value in values)
        assumed = frozenset[str]().union(*(value.assumed for value in values if value is not None))
        if func is aten._local_scalar_dense.default:
            return self._scalar(args[0], values[0])
        if not known or torch.Tag.nondeterministic_seeded in func.tags:
            return self._on_fakes(func, types, args, kwargs)
        try:
            result = super().dispatch(func, types, args, kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            self._note(assumed)
            return self._made_from(self._run(func, args, kwargs), assumed)
        if all(leaf.numel() <= LIMIT for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            self._remember(result, self._run(func, args, kwargs), assumed)
        elif func._schema.is_mutable:
            self._forget(func, args, kwargs)
        return result

    def _on_fakes(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Some values are not known: choices are assumed, and so is what only values can tell."""
        picked = self._with_numbers(func, args)
        if picked is not args:
            func = aten.index.Tensor
        if func._schema.is_mutable:
            self._forget(func, args, kwargs)
        try:
            result = super().dispatch(func, types, picked, kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            note = f"{_name(func)} of computed values: taken to hold for every element"
            self._note(frozenset({f"{note} ({self._place()})"}))
            standing = tree_map(lambda leaf: self._stand_in(leaf) if isinstance(leaf, Tensor) else leaf, args)
            result = func(*standing, **kwargs)
            return self._made_from(result, frozenset())
        if func in _CHOICES:
            self._spread(func, args, result)
        return result

    def _value(self, tensor: Tensor) -> _Value | None:
        if not isinstance(tensor, FakeTensor):
            return _Value(tensor) if type(tensor) in (Tensor, nn.Parameter) else None
        value: _Value | None = getattr(tensor, _VALUE, None)
        if value is None or value.tensor.untyped_storage()._cdata in self._state.stale:
            return None
        return value

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`func` on the values, all known."""

        def real(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            value = self._value(leaf)
            assert value is not None
            return value.tensor

        kwargs = {
            key: "cpu" if key == "device" and value is not None else value for key, value in kwargs.items()
        }
        with torch.no_grad():
            result = func(*tree_map(real, args), **tree_map(real, kwargs))
        if func._overloadpacket in _EMPTY:
            result.zero_()
        return result

    def _remember(self, fakes: Any, reals: Any, assumed: frozenset[str]) -> None:
        for fake, real in zip(tree_leaves(fakes), tree_leaves(reals), strict=True):
            if isinstance(fake, FakeTensor) and isinstance(real, Tensor) and fake.shape == real.shape:
                setattr(fake, _VALUE, _Value(real, assumed))

    def _made_from(self, reals: Any, assumed: frozenset[str]) -> Any:
        """Fakes of `reals`, which know their values."""

        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            with self, self.plain():
                made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
            if leaf.numel() <= LIMIT:
                setattr(made, _VALUE, _Value(leaf, assumed))
            return made

        return tree_map(fake, reals)

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """What `func` writes to is not known any more, under no view."""
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            for leaf in tree_leaves(given):
                value = self._value(leaf) if isinstance(leaf, Tensor) else None
                if value is not None:
                    storage = value.tensor.untyped_storage()
                    self._state.stale[storage._cdata] = storage

    # -- assumptions -----------------------------------------------------------------------------

    def _scalar(self, tensor: Tensor, value: _Value | None) -> Any:
        if value is not None:
            self._note(value.assumed)
            return value.tensor.item()
        place = self._place()
        self._state.answers[place] += 1
        if tensor.dtype is torch.bool:
            answer: Any = self._state.answers[place] % _PATIENCE == 0
        else:
            answer = 1.0 if tensor.dtype.is_floating_point else 1
        self._note(frozenset({f"a computed value that the code asks for: taken to be {answer} ({place})"}))
        return answer

    def _with_numbers(self, func: Any, args: Any) -> Any:
        """The arguments of `func` with masks that index or select as the numbers of their elements."""
        if func not in (aten.index.Tensor, aten.masked_select.default):
            return args
        given = args[1]
        if func is aten.masked_select.default:
            args = torch.broadcast_tensors(*args[:2])
            given = [args[1]]
        if not any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in given):
            return args
        indices: list[Any] = []
        for index in given:
            if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                value = self._value(index)
                if value is None:
                    self._note(frozenset({f"a computed mask: taken to hold everywhere ({self._place()})"}))
                    mask = torch.ones(index.shape, dtype=torch.bool)
                else:
                    self._note(value.assumed)
                    mask = value.tensor.bool()
                assumed = frozenset() if value is None else value.assumed
                indices += self._made_from(mask.nonzero(as_tuple=True), assumed)
            else:
                indices.append(index)
        return (args[0], indices, *args[2:])

    def _stand_in(self, leaf: Tensor) -> Tensor:
        """Values for a tensor that has none: ones, without their memory."""
        value = self._value(leaf)
        return value.tensor if value is not None else torch.ones((), dtype=leaf.dtype).expand(leaf.shape)

    def _spread(self, func: Any, args: Any, result: Any) -> None:
        """Give the chosen indices in `result` values: every choice as often as any other."""
        indices = result[-1] if isinstance(result, tuple | list) else result
        position = _CHOICES[func]
        usual = None if func in (aten.argmax.default, aten.argmin.default) else -1
        dim = args[position] if position is not None and position < len(args) else usual
        if indices.numel() > LIMIT or args[0].ndim == 0:
            return
        size = args[0].numel() if dim is None else args[0].shape[dim]
        last = indices.shape if dim is None or func in _FLAT else _moved(indices.shape, dim)
        if func in (aten.sort.default, aten.sort.stable):
            values = torch.arange(size).expand(last)
        else:
            values = torch.arange(indices.numel()).remainder(size).view(last)
        if values.shape != indices.shape:
            values = values.movedim(-1, dim or 0)
        place = self._place()
        text = f"{_name(func)} of computed values: taken to spread evenly over its {size} choices ({place})"
        setattr(indices, _VALUE, _Value(values.contiguous(), frozenset({text})))

    def _note(self, sentences: frozenset[str]) -> None:
        self._state.notes.update(dict.fromkeys(sorted(sentences)))

    # -- where -----------------------------------------------------------------------------------

    def _place(self) -> str:
        path, source = where(sys._getframe(1), self._paths)
        return ", ".join(part for part in (path, source) if part)

    def _note_product(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None and "backward" not in str(func):
            flops = formula(*args, **kwargs, out_val=result)
        elif func._overloadpacket in OPAQUE:
            flops = sum(2 * math.prod(sizes) for sizes in weights_sizes(func, args))
        else:
            return
        path, source = where(sys._getframe(1), self._paths)
        self._state.products.append(EagerProduct(operator=_name(func), flops=flops, path=path, source=source))


_USER_CODE = re.compile(r'File "([^"<]+)", line (\d+), in ')
_FLAT = frozenset({aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim})


def _moved(shape: torch.Size, dim: int) -> list[int]:
    """`shape` with `dim` last."""
    dim %= len(shape)
    return [*shape[:dim], *shape[dim + 1 :], shape[dim]]


def _name(func: Any) -> str:
    return str(func._overloadpacket).removeprefix("aten.")


def where(frame: FrameType | None, paths: dict[int, str]) -> tuple[str, str]:
    """Path of the innermost module and ``file:line`` of the innermost code outside torch, up from `frame`."""
    path, source = "", ""
    while frame is not None and not path:
        if not source and not frame.f_code.co_filename.startswith((*_OUTSIDE, "<")):
            source = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            path = paths.get(id(owner), "")
        frame = frame.f_back
    return path, source


def where_failed(error: BaseException, model: nn.Module) -> str:
    """`` in the layer PATH (file:line)``: where in `model` an error was raised, "" if that is not known."""
    paths = {id(module): path for path, module in model.named_modules()}
    path, source = "", ""
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            path = paths.get(id(owner)) or path
        if not frame.f_code.co_filename.startswith((*_OUTSIDE, "<")):
            source = f"{frame.f_code.co_filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    said = _USER_CODE.findall(str(error))
    if said:  # Dynamo has traced into the model, and says how far
        source = ":".join(said[-1])
    return "".join((f" in {path}" if path else "", f" ({source})" if source else ""))
