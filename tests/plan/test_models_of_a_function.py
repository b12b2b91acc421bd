"""Functions with several models and graph breaks: names begin with the model, as without the breaks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.fresh import forget
from helpers.made import Made
from helpers.reports import EVERYTHING, all_gemms, precisions
from torch import Tensor, nn

import mxcompile
from mxcompile.report.data.record import NOT_COMPILED

WIDTH, WIDE = 64, 96
ALL = EVERYTHING["rules"]
STUDENT = {"version": 1, "rules": [{"match": {"name": "student.*"}, "use": "bf16"}, *ALL]}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDE), nn.GELU(), nn.Linear(WIDE, WIDTH))


def cut() -> None:
    torch._dynamo.graph_break()


def whole() -> None:
    pass


def of_arguments(between: Callable[[], None]) -> Callable[[Tensor], Tensor]:
    def step(teacher: nn.Module, student: nn.Module, x: Tensor) -> Tensor:
        y = teacher(x)
        between()
        return y + student(x)

    models = mlp(), mlp()
    compiled = torch.compile(step, backend=EagerBackend(policy=STUDENT))
    return lambda x: compiled(*models, x)


def of_a_closure(between: Callable[[], None]) -> Callable[[Tensor], Tensor]:
    teacher, student = mlp(), mlp()

    def step(x: Tensor) -> Tensor:
        y = teacher(x)
        between()
        return y + student(x)

    return torch.compile(step, backend=EagerBackend(policy=STUDENT))


class Trainer:
    def __init__(self, between: Callable[[], None]) -> None:
        self.teacher, self.student, self.between = mlp(), mlp(), between

    def step(self, x: Tensor) -> Tensor:
        y: Tensor = self.teacher(x)
        self.between()
        return y + self.student(x)


def of_attributes(between: Callable[[], None]) -> Callable[[Tensor], Tensor]:
    return torch.compile(Trainer(between).step, backend=EagerBackend(policy=STUDENT))


@pytest.mark.parametrize("between", [whole, cut])
@pytest.mark.parametrize("make", [of_arguments, of_a_closure, of_attributes])
def test_rule_by_model_name_matches_with_and_without_a_graph_break(
    make: Callable[[Callable[[], None]], Callable[[Tensor], Tensor]], between: Callable[[], None]
) -> None:
    make(between)(torch.randn(8, WIDTH)).sum().backward()
    expected = {"teacher.0": {"mxfp8"}, "teacher.2": {"mxfp8"}, "student.0": {"bf16"}, "student.2": {"bf16"}}
    assert precisions() == expected


class Pair(NamedTuple):
    teacher: nn.Module
    student: nn.Module


@pytest.mark.parametrize("between", [whole, cut])
def test_models_in_a_namedtuple_have_the_names_of_its_fields(between: Callable[[], None]) -> None:
    def step(pair: Pair, x: Tensor) -> Tensor:
        y: Tensor = pair.teacher(x)
        between()
        return y + pair.student(x)

    torch.compile(step, backend=EagerBackend())(Pair(mlp(), mlp()), torch.randn(8, WIDTH))
    assert precisions().keys() == {f"pair.{model}.{n}" for model in Pair._fields for n in (0, 2)}


def test_only_model_of_a_function_keeps_its_own_names() -> None:
    def step(model: nn.Module, loss: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        cut()
        return loss(y, x)  # type: ignore[no-any-return]

    torch.compile(step, backend=EagerBackend(policy=EVERYTHING))(mlp(), nn.MSELoss(), torch.randn(8, WIDTH))
    assert precisions().keys() == {"0", "2"}


def test_code_after_a_break_is_not_shared_by_models_with_other_rules() -> None:
    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def chosen(models: list[nn.Module], order: list[int]) -> nn.Module:
        return models[order.pop()]

    def step(models: list[nn.Module], order: list[int], x: Tensor) -> Tensor:
        model = chosen(models, order)
        return model(x)  # type: ignore[no-any-return]

    second = {"match": {"name": "models.1.*"}, "use": "mxfp8"}
    policy = {"version": 1, "rules": [second, {"match": {"name": "*"}, "use": "bf16"}]}
    models, order, x = [mlp(), mlp()], [1, 0], torch.randn(8, WIDTH)
    compiled = torch.compile(step, backend=EagerBackend(policy=policy))
    torch.testing.assert_close(compiled(models, order, x), models[0](x))
    assert (compiled(models, order, x) - models[1](x)).abs().max() > 1e-3
    assert precisions()["models.0.0"] == {"bf16"}
    assert precisions()["models.1.0"] == {"mxfp8"}


class Broken(Made, up=(WIDTH, WIDE), down=(WIDE, WIDTH)):
    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x).relu()
        cut()
        return self.down(x)


def of_a_decorated_function(teacher: nn.Module, student: nn.Module) -> Callable[[Tensor], Tensor]:
    def decorated(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Tensor:
            return function(*args, **kwargs)

        return wrapper

    @decorated
    def step(teacher: nn.Module, student: nn.Module, x: Tensor) -> Tensor:
        return teacher(x) + student(x)

    compiled = torch.compile(step, backend=EagerBackend(policy=STUDENT, strict=True))
    return lambda x: compiled(teacher, student, x)


def of_cells(teacher: nn.Module, student: nn.Module) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        y: Tensor = teacher(x) + student(x)
        return y

    return torch.compile(step, backend=EagerBackend(policy=STUDENT, strict=True))


@pytest.mark.parametrize("of", [of_cells, of_a_decorated_function])
@pytest.mark.parametrize("make", [mlp, Broken])
def test_models_that_break_their_own_graph_are_named_by_the_function(
    make: Callable[[], nn.Module], of: Callable[..., Callable[[Tensor], Tensor]]
) -> None:
    teacher, student = make(), make()
    of(teacher, student)(torch.randn(8, WIDTH)).sum().backward()
    layers = [path for path, module in teacher.named_modules() if isinstance(module, nn.Linear)]
    expected = {f"teacher.{path}": {"mxfp8"} for path in layers}
    assert precisions() == expected | {f"student.{path}": {"bf16"} for path in layers}
    assert {gemm.kernel for gemm in all_gemms()}.isdisjoint({NOT_COMPILED})


def test_equal_models_in_a_loop_have_records_each() -> None:
    models = [Broken() for _ in range(4)]

    def step(models: list[nn.Module], x: Tensor) -> Tensor:
        for model in models:
            x = model(x)
        return x

    rule = {"match": {"name": "models.2.up"}, "use": "bf16"}
    backend = EagerBackend(policy={"version": 1, "rules": [rule, *ALL]}, strict=True)
    torch.compile(step, backend=backend)(models, torch.randn(8, WIDTH)).sum().backward()
    names = {f"models.{index}.{layer}" for index in range(4) for layer in ("up", "down")}
    assert precisions() == {name: {"bf16" if name == "models.2.up" else "mxfp8"} for name in names}


def test_models_of_a_function_that_share_parameters_have_their_own_names() -> None:
    teacher = mlp()
    student = copy.deepcopy(teacher, {id(p): p for p in teacher.parameters()})
    loss = nn.MSELoss()

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = teacher(x)
        return loss(student(x), y)

    torch.compile(step, backend=EagerBackend(policy=STUDENT, strict=True))(torch.randn(8, WIDTH)).backward()
    expected = {f"teacher.{layer}": {"mxfp8"} for layer in "02"}
    assert precisions() == expected | {f"student.{layer}": {"bf16"} for layer in "02"}


class Evaluation:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def step(self, x: Tensor) -> Any:
        return self.model(x)


def called(model: nn.Module, x: Tensor) -> Any:
    return model(x)


COMPILED: dict[str, Callable[[nn.Module, EagerBackend], Any]] = {
    "argument": lambda model, backend: functools.partial(torch.compile(called, backend=backend), model),
    "variable": lambda model, backend: torch.compile(lambda x: model(x), backend=backend),
    "attribute": lambda model, backend: torch.compile(Evaluation(model).step, backend=backend),
}


@pytest.mark.parametrize("way", COMPILED)
def test_each_model_that_runs_the_code_of_a_function_has_a_report(way: str) -> None:
    backend, compiles = EagerBackend(policy=EVERYTHING, strict=True), []
    backend.before = compiles.append
    for number, model in enumerate([mlp() for _ in range(3)], 1):
        for _ in range(2):
            COMPILED[way](model, backend)(torch.randn(8, WIDTH)).sum().backward()
        names = [{gemm.name for gemm in report.gemms} for report in mxcompile.reports()]
        assert names == [{"0", "2"}] * number
    assert len(compiles) == 1, "Dynamo runs the code of the first"


def test_each_of_two_models_that_share_parameters_has_a_report_of_one_function() -> None:
    first = mlp()
    second = copy.deepcopy(first, {id(p): p for p in first.parameters()})
    compiled = torch.compile(called, backend=EagerBackend(policy=EVERYTHING, strict=True))
    for model in (first, second, first):
        compiled(model, torch.randn(8, WIDTH)).sum().backward()
    assert [{gemm.name for gemm in report.gemms} for report in mxcompile.reports()] == [{"0", "2"}] * 2


def test_model_compiled_alone_after_a_function_has_its_own_names() -> None:
    teacher, student = Broken(), Broken()
    of_cells(teacher, student)(torch.randn(8, WIDTH))
    forget()
    alone = {"version": 1, "rules": [{"match": {"name": "up"}, "use": "bf16"}, *ALL]}
    torch.compile(student, backend=EagerBackend(policy=alone, strict=True))(torch.randn(8, WIDTH))
    assert precisions() == {"up": {"bf16"}, "down": {"mxfp8"}}


def test_product_of_two_models_results_has_the_name_of_neither():
    left, right = nn.Linear(WIDTH, WIDE), nn.Linear(WIDTH, WIDE)

    def similarity(x: Tensor) -> Tensor:
        return left(x) @ right(x).t()

    torch.compile(similarity, backend=EagerBackend(policy=EVERYTHING))(torch.randn(8, WIDTH))
    (report,) = mxcompile.reports()
    forward = {(gemm.name, gemm.precision) for gemm in report.gemms if gemm.gemm == "fprop"}
    assert forward == {("left", "mxfp8"), ("right", "mxfp8"), ("", "bf16")}
