"""Blocks compiled one by one: shared code, policies by index, what strict mode says and when."""

from __future__ import annotations

import logging
from typing import Any

import families
import pytest
import torch
from families import FFN, LAYERS, WIDTH, WORDS, Family, build
from helpers.eager_backend import EagerBackend
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from ways import broken, by_block, front_door, pending, policy, report_of_all, rows, values, whole

import mxcompile
from mxcompile.errors import UnsupportedError


def explained(family: Family, decided: Any) -> set[Any]:
    return rows(mxcompile.explain(family.model, *family.inputs, policy=decided, target="cpu"))


def deep(layers: int, monkeypatch: pytest.MonkeyPatch) -> Family:
    monkeypatch.setattr(families, "LAYERS", layers)
    return build("llama")


def test_equal_blocks_share_one_code_and_different_ones_do_not(monkeypatch: pytest.MonkeyPatch):
    family = deep(6, monkeypatch)
    compiled: list[Any] = []
    run = by_block(family.model, policy=policy(family.model), before=compiled.append)
    values(family, run)
    graphs = len(compiled)
    values(family, run)
    assert len(compiled) == graphs, "a second step compiles nothing"
    assert graphs == 3  # one for every kind of block


def test_the_front_door_compiles_all_of_it_and_each_kind_once(monkeypatch: pytest.MonkeyPatch):
    family = deep(6, monkeypatch)
    decided = policy(family.model)
    expected = explained(family, decided)
    compiled: list[Any] = []
    run = front_door(family.model, policy=decided, before=compiled.append)
    outputs = values(family, run)
    assert rows(report_of_all()) == expected
    assert len(compiled) == 4  # three kinds of block, the head
    values(family, run)
    assert len(compiled) == 4
    other = deep(6, monkeypatch)
    assert torch.allclose(outputs["output"], values(other, whole(other.model, policy=decided))["output"])


@pytest.mark.slow
def test_more_kinds_than_dynamo_keeps_codes(monkeypatch: pytest.MonkeyPatch):
    family = deep(10, monkeypatch)
    kinds = [{"match": {"name": f"blocks.{i}.*", "min_n": 8 + i}, "use": "mxfp8"} for i in range(10)]
    decided = {"version": 1, "preset": "nvidia", "rules": kinds}
    eight = torch._dynamo.config.patch(recompile_limit=8)  # another test may have raised it
    with eight, pytest.raises(BackendCompilerFailed, match=r"mxcompile\.compile"):
        values(family, by_block(family.model, policy=decided))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8):
        values(family, front_door(family.model, policy=decided))
        assert rows(report_of_all()) == explained(family, decided)


STRICT = {
    "a rule that fits nothing": ({"name": "blocks.9.*"}, "rule 1 matched no layer"),
    "a name misspelt": ({"name": "haed"}, "did you mean 'head'"),
}


@pytest.mark.parametrize("name", STRICT)
@pytest.mark.parametrize("way", [by_block, front_door, whole], ids=lambda way: way.__name__)
def test_strict_holds_before_the_first_step(name: str, way: Any):
    llama = build("llama")
    match, message = STRICT[name]
    run = way(llama.model, policy={"version": 1, "rules": [{"match": match, "use": "bf16"}]}, strict=True)
    with broken(llama.model, {"blocks.1"}, set()), pytest.raises(BackendCompilerFailed, match=message):
        values(llama, run)
    assert mxcompile.reports() == []


class Loop(nn.Module):
    """A loop that Dynamo cannot follow, over modules of torch's own: it lets them run as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.feed = families.FeedForward(torch.relu)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
            torch._dynamo.graph_break()
        return self.head(x + self.feed(x))


LOOP = {"version": 1, "rules": [{"match": {"name": "layers.*"}, "use": "mxfp8"}]}
OUTSIDE = r"ran outside of compiled code .*: layers\.0-2$"


def looped() -> Family:
    torch.manual_seed(0)
    return Family(model=Loop(), inputs=(torch.randint(0, WORDS, (2, 8)),))


def test_layers_outside_of_compiled_code_are_in_the_report_as_such():
    family = looped()
    values(family, whole(family.model, policy=LOOP))
    report = report_of_all()
    assert {row[0] for row in rows(report)} == {"feed.up", "feed.down"}
    waiting = {(name, gemm, precision) for name, _, gemm, precision, _ in pending(report)}
    layers = [(f"layers.{index}", "mxfp8") for index in range(LAYERS)] + [("head", "bf16")]
    kinds = ("fprop", "dgrad", "wgrad")
    assert waiting == {(name, kind, precision) for name, precision in layers for kind in kinds}
    assert report.summary.warnings == ("not compiled yet, or run outside of compiled code: layers.0-2",)
    compiled, uncompiled = 3 * 2 * WIDTH * FFN, 3 * (LAYERS * WIDTH * WIDTH + WIDTH * WORDS)
    assert report.summary.flop_share == pytest.approx(compiled / (compiled + uncompiled))


def test_first_backward_warns_of_layers_run_outside(caplog: pytest.LogCaptureFixture):
    family = looped()
    with caplog.at_level(logging.WARNING, "mxcompile"):
        values(family, torch.compile(family.model, backend=mxcompile.Backend(policy=LOOP)))
    assert len([r.getMessage() for r in caplog.records if "outside of compiled code" in r.getMessage()]) == 1


def test_strict_backend_raises_for_layers_run_outside():
    family = looped()
    run = torch.compile(family.model, backend=mxcompile.Backend(policy=LOOP, strict=True))
    with pytest.raises(Exception, match=OUTSIDE) as raised:
        values(family, run)
    assert isinstance(getattr(raised.value, "inner_exception", raised.value), UnsupportedError)


class TwoCalls(nn.Module):
    """Called in two ways, of which each runs layers that the other does not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.block = build("llama").model.blocks[0]
        self.other = build("llama").model.blocks[1]
        self.head, self.values = nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, valued: bool = False) -> Tensor:
        x = self.block(self.embed(ids))
        torch._dynamo.graph_break()
        return self.values(self.other(x)) if valued else self.head(x)


def test_another_call_adds_its_layers_to_the_plan():
    ids = torch.randint(0, WORDS, (2, 8))
    torch.manual_seed(0)
    model = TwoCalls()
    compiled = torch.compile(model, backend=EagerBackend())
    calls = [{"valued": valued} for valued in (False, True)]
    first, second = (rows(mxcompile.explain(model, ids, kwargs=call, target="cpu")) for call in calls)
    compiled(ids).sum().backward()
    assert rows(report_of_all()) == first
    compiled(ids, valued=True).sum().backward()
    assert rows(report_of_all()) == first | second
    assert not any("decided on a part of the model" in gemm.reason for gemm in report_of_all().gemms)
    assert pending(report_of_all()) == set()
