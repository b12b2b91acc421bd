"""Planning runs no compiled code, whatever the forward of a model is: a closure, a partial, a hook."""

from __future__ import annotations

import functools
import logging
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import Family
from helpers.fresh import forget
from helpers.made import Made
from helpers.paces import mostly_slow
from test_nothing_compiled import Block
from torch import Tensor, nn
from torch._dynamo.utils import counters
from ways import Row, front_door, pending, report_of_all, rows, values

import mxcompile
from mxcompile.compiler.session.decompositions import table
from mxcompile.errors import ModelError
from mxcompile.plan.plan import make_plan

WIDTH, WORDS, LAYERS = 8, 12, 3
POLICY = {"version": 1, "rules": [{"match": {"name": "blocks.0.*"}, "use": "bf16"}]}


def blocks() -> nn.Module:
    return nn.ModuleList(Block() for _ in range(LAYERS))


class Model(Made, embed=lambda: nn.Embedding(WORDS, WIDTH), blocks=blocks, head=(WIDTH, WORDS)):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build() -> Family:
    torch.manual_seed(0)
    return Family(model=Model(), inputs=(torch.randint(0, WORDS, (2, 5)),))


class Casts:
    """A callable that is no function and refuses to be pickled, like Accelerate's for outputs in FP32."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs).float()

    def __getstate__(self) -> Any:
        raise TypeError("not to be pickled")


class Runner:
    """Another object, whose method runs the model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.runs = 0

    def run(self, *args: Any) -> Any:
        self.runs += 1
        return type(self.model).forward(self.model, *args)


_HELD: dict[str, Any] = {}


def closure(model: nn.Module) -> None:
    original = model.forward
    model.forward = functools.wraps(model.forward)(lambda *a, **k: original(*a, **k))


def closure_over_the_model(model: nn.Module) -> None:
    model.forward = lambda *a: type(model).forward(model, *a)


def closure_of_a_closure(model: nn.Module) -> None:
    closure(model)
    closure(model)


def closure_named_as_torchs(model: nn.Module) -> None:
    """What `functools.wraps` makes of the forward of an ``nn.Sequential``."""
    closure(model)
    model.forward.__module__ = nn.Sequential.forward.__module__


def closure_of_a_callable(model: nn.Module) -> None:
    casts = Casts(model.forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return casts(*args, **kwargs)

    forward.__wrapped__ = casts  # type: ignore[attr-defined]
    model.forward = forward


def callable_object(model: nn.Module) -> None:
    model.forward = Casts(model.forward)


def partial(model: nn.Module) -> None:
    model.forward = functools.partial(type(model).forward, model)


def partial_of_a_closure(model: nn.Module) -> None:
    original = model.forward
    model.forward = functools.partial(lambda run, *a: run(*a), lambda *a: original(*a))


def default_argument(model: nn.Module) -> None:
    def forward(*args: Any, original: Any = model.forward) -> Any:
        return original(*args)

    model.forward = forward


def own_method(model: nn.Module) -> None:
    original = model.forward
    model.forward = types.MethodType(lambda self, *a: original(*a), model)


def method_of_another(model: nn.Module) -> None:
    model.forward = Runner(model).run


def weak_reference(model: nn.Module) -> None:
    module = weakref.ref(model)
    model.forward = lambda *a: type(module()).forward(module(), *a)


def global_of_the_file(model: nn.Module) -> None:
    _HELD["forward"] = model.forward
    model.forward = _from_global


def _from_global(*args: Any) -> Any:
    return _HELD["forward"](*args)


def compiled_and_kept(model: nn.Module) -> None:
    original = torch.compile(model.forward, backend="eager")
    model.forward = lambda *a: original(*a)


def disabled(model: nn.Module) -> None:
    original = torch.compiler.disable(model.forward, recursive=False)
    model.forward = lambda *a: original(*a)


def hook_that_runs_a_block(model: nn.Module) -> None:
    first = model.blocks[0]
    model.head.register_forward_pre_hook(lambda _, args: (args[0] + 0 * first(args[0]),))


def call_replaced(model: nn.Module) -> None:
    kind = type(model)

    def call(self: nn.Module, *args: Any) -> Any:
        return kind.__call__(self, *args)

    model.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def closures_of_blocks(model: nn.Module) -> None:
    for block in model.blocks:
        closure(block)


FORWARDS = [
    closure, closure_over_the_model, closure_of_a_closure, closure_of_a_callable, callable_object, partial,
    partial_of_a_closure, default_argument, own_method, method_of_another, weak_reference, global_of_the_file,
    disabled, call_replaced, closures_of_blocks, closure_named_as_torchs,
]  # fmt: skip
LEADING_TO_COMPILED = [compiled_and_kept, hook_that_runs_a_block]
"""What these run of the model is in other code than its blocks'."""


def planned_alike(family: Family) -> None:
    """A plan of the model is that of one that is as it was written; making it compiles nothing."""
    before = dict(counters["frames"])
    plan = make_plan(family.model, family.inputs, {}, table())
    assert dict(counters["frames"]) == before
    assert {(t.name, t.role, t.block, t.n, t.k) for t in plan.tags} == {
        (t.name, t.role, t.block, t.n, t.k) for t in make_plan(build().model, family.inputs, {}, table()).tags
    }


@pytest.mark.parametrize("replaced", [*FORWARDS, *LEADING_TO_COMPILED], ids=lambda f: f.__name__)
def test_a_plan_knows_the_model_behind_any_forward(replaced: Any):
    family = build()
    replaced(family.model)
    planned_alike(family)
    mxcompile.compile(family.model)
    planned_alike(family)


@functools.cache
def _as_written() -> tuple[Tensor, set[Row]]:
    """Output and report of the model with the forward of its class."""
    family = build()
    results = values(family, front_door(family.model, policy=POLICY))["output"], rows(report_of_all())
    forget()
    return results


ORDERS = [(replaced, before) for replaced in FORWARDS for before in (True, False)]
"""Forwards that are replaced before or after the model is compiled in place."""


@pytest.mark.parametrize(
    ("replaced", "before"),
    mostly_slow(ORDERS, *ORDERS[::7], rows=True),
    ids=lambda value: getattr(value, "__name__", "before" if value else "after"),
)
def test_any_forward_is_compiled_as_its_model_is(replaced: Any, before: bool, caplog):
    expected, of_plain = _as_written()
    family = build()
    limit = torch._dynamo.config.recompile_limit
    replaced(family.model) if before else None
    run = front_door(family.model, policy=POLICY, strict=True)
    replaced(family.model) if not before else None
    with caplog.at_level(logging.WARNING):
        output = values(family, run)["output"]
    assert not [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert torch._dynamo.config.recompile_limit == limit
    assert rows(report_of_all()) == of_plain
    assert pending(report_of_all()) == set()
    assert torch.equal(output, expected)


class Stubborn(Runner):
    """Says itself how it is copied: not at all."""

    def __deepcopy__(self, memo: Any) -> Stubborn:
        return self


def test_a_forward_that_cannot_be_copied_is_not_planned(caplog):
    family = build()
    family.model.forward = Stubborn(family.model).run
    with pytest.raises(ModelError, match="refuses to be copied"):
        make_plan(family.model, family.inputs, {}, table())
    with caplog.at_level(logging.WARNING):
        values(family, front_door(family.model))
    assert any("has no plan" in message and "refuses" in message for message in caplog.messages)
    assert {"blocks.0.up", "head"} <= {row[0] for row in rows(report_of_all())}


def test_plan_leaves_the_owner_of_a_replaced_forward_unchanged():
    family = build()
    runner = Runner(family.model)
    family.model.forward = runner.run
    make_plan(family.model, family.inputs, {}, table())
    assert runner.runs == 0
    assert runner.model is family.model


def test_a_model_behind_a_closure_is_explained_as_it_is():
    plain, family = build(), build()
    closure(family.model)
    reports = [mxcompile.explain(outputs.model, *outputs.inputs, target="cpu") for outputs in (plain, family)]
    assert rows(reports[0]) == rows(reports[1])
