"""Of a model without a plan, the report says what is not known; strict mode raises."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.made import Made
from helpers.reports import EVERYTHING, all_gemms
from test_left_to_python import WIDTH, batch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from ways import by_block, front_door, report_of_all, whole

import mxcompile
from mxcompile.report import Report
from mxcompile.report.data.record import NOT_COMPILED
from mxcompile.report.forms import FORMS


@torch._dynamo.disable
def plain(x: Tensor) -> Tensor:
    """Takes no tensors but torch's own, as code in C does; so no plan is made."""
    if type(x) is not Tensor:
        raise TypeError(f"not a plain tensor: {type(x).__name__}")
    return x


class Cut(nn.Module):
    """Layers before, in and behind code that Dynamo leaves to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.shift = nn.Embedding(4, WIDTH), nn.Parameter(torch.zeros(1, WIDTH))
        self.before, self.behind = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inside = nn.Linear(WIDTH, 2 * WIDTH)
        self.matrix = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))

    @torch._dynamo.disable
    def python(self, x: Tensor) -> Tensor:
        return plain(self.inside(x)) @ self.matrix

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.python(self.before(x + self.shift)))


class Stack(Made, blocks=lambda: nn.ModuleList(Cut() for _ in range(3))):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def unknown(report: Report) -> dict[str, str]:
    """The sizes of the records that have no compiled code, as the text shows them, by name."""
    sizes = {g.name: (g.m, g.n, g.k) for g in report.gemms if g.kernel == NOT_COMPILED}
    assert {g.code for g in report.gemms if g.kernel == NOT_COMPILED} <= {"no plan"}
    return sizes


def test_weights_that_no_graph_reads_are_in_the_report(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "mxcompile"):
        whole(Cut(), policy=EVERYTHING)(batch()).sum().backward()
    report = report_of_all()
    assert unknown(report) == {"inside": (None, 2 * WIDTH, WIDTH), "matrix": (None, 2 * WIDTH, WIDTH)}
    assert {gemm.name for gemm in report.gemms} == {"before", "behind", "inside", "matrix"}
    (note,) = report.summary.warnings
    assert note.startswith("Cut has no plan")
    assert "not a plain tensor" in note
    assert "may lack layers outside of its compiled graphs" in note
    assert [r.getMessage() for r in caplog.records if "Cut has no plan" in r.getMessage()]


def test_a_model_that_is_neither_compiled_nor_planned_has_records_of_its_weights():
    class Left(Cut):
        forward = torch.compiler.disable(Cut.forward)

    front_door(Left(), policy=EVERYTHING)(batch())
    report = report_of_all()
    assert unknown(report).keys() == {"before", "behind", "inside", "matrix", "shift"}
    assert report.summary.flop_share == 0


def test_every_report_form_notes_a_missing_plan():
    whole(Cut(), policy=EVERYTHING)(batch())
    report = report_of_all()
    for suffix, form in FORMS.items():
        text = " ".join(form(report).split())
        assert "Cut has no plan" in text, suffix
        assert "inside" in text, suffix
    for text in (str(report), FORMS[".md"](report)):
        assert "2 products of unknown FLOPs not in it" in " ".join(text.split())
    assert Report.from_json(report.to_json()) == report


@pytest.mark.parametrize("way", [whole, front_door, by_block], ids=lambda way: way.__name__)
def test_modules_that_share_code_have_records_each(way: Any):
    way(Stack(), policy=EVERYTHING)(batch()).sum().backward()
    report = report_of_all()
    names = {f"blocks.{number}.{name}" for number in range(3) for name in ("inside", "matrix")}
    assert set(unknown(report)) == names
    compiled = {gemm.name for gemm in report.gemms} - names
    assert compiled == {f"blocks.{n}.{name}" for n in range(3) for name in ("before", "behind")}


@pytest.mark.parametrize("make", [Cut, Stack])
@pytest.mark.parametrize("way", [whole, front_door], ids=lambda way: way.__name__)
def test_strict_raises_for_a_cut_model_without_a_plan(make: Any, way: Any):
    with pytest.raises(BackendCompilerFailed, match=r"has no plan.*TORCH_LOGS=graph_breaks"):
        way(make(), policy=EVERYTHING, strict=True)(batch())
    assert mxcompile.reports() == []


class Ragged(Made, q=(64, 64), k=(64, 64), v=(64, 64), o=(64, 64), last=(64, 64)):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, 16)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attention = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        return self.last(x + self.o(attention))


def test_strict_raises_for_attention_over_jagged_tensors():
    x = torch.nested.nested_tensor([torch.randn(rows, 64) for rows in (5, 9, 3)], layout=torch.jagged)
    with pytest.raises(BackendCompilerFailed, match="plan"):
        whole(Ragged(), policy=EVERYTHING, strict=True)(x)


class Noisy(Made, before=(WIDTH, WIDTH), behind=(WIDTH, WIDTH)):
    def forward(self, x: Tensor, inputs: dict[str, Any]) -> Tensor:
        x = self.before(x)
        torch._dynamo.graph_break()
        return self.behind(x + torch.randn(x.shape, generator=inputs["generator"]) * inputs["scale"])


def test_arguments_that_cannot_be_copied_do_not_prevent_a_plan(messages: Any):
    inputs = {
        "generator": torch.Generator().manual_seed(3),
        "scale": torch.ones(1),
        "lock": threading.Lock(),
        "words": (word for word in "ab"),
    }
    assert whole(Noisy(), policy=EVERYTHING, strict=True)(batch(), inputs).shape == (4, WIDTH)
    assert {gemm.name for gemm in report_of_all().gemms} == {"before", "behind"}
    assert messages() == []
    expected = torch.Generator().manual_seed(3)
    torch.randn((4, WIDTH), generator=expected)
    assert torch.equal(inputs["generator"].get_state(), expected.get_state())
    assert [*inputs["words"]] == ["a", "b"]


def functions() -> tuple[Any, Any]:
    """A function of two modules with a graph break between them."""
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def both(x: Tensor) -> Tensor:
        x = first(x) + second(x)
        torch._dynamo.graph_break()
        return first(x)

    return lambda **options: torch.compile(both, backend=EagerBackend(policy=EVERYTHING, **options)), both


def test_cut_function_without_module_notes_a_missing_plan():
    compiled, _ = functions()
    compiled()(batch())
    notes = [note for report in mxcompile.reports() for note in report.summary.warnings]
    assert notes
    assert all("not part of a module" in note for note in notes)
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="compile the module that has its layers"):
        compiled(strict=True)(batch())


def test_training_step_with_its_optimizer_needs_no_plan():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @torch.compile(backend=EagerBackend(policy=EVERYTHING, strict=True))
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step(batch())
    assert {gemm.gemm for gemm in all_gemms()} == {"fprop", "wgrad"}
