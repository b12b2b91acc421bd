"""Samples of a run: what they say is counted from eager tensors, and the run is the same with and without."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.paces import mostly_slow
from helpers.reference import round_trip, sqnr_db
from helpers.reports import EVERYTHING
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from watched_models import FFN, LAYERS, WIDTH, Model, batch, direction, keys, samples, train

import mxcompile
from mxcompile.errors import OptionError
from mxcompile.passes.watch import OPERANDS
from mxcompile.watch import Watch, read


def run(
    path: Path | None, *, checkpointed: bool | None = None, blocks: bool = False, **how: Any
) -> list[Tensor]:
    """A run of the passes without Inductor. path: of the samples, of every second step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(checkpointed).to(how.get("dtype", torch.float32))
    watch = None if path is None else Watch(path, every=2)
    backend = EagerBackend(root=model, parts=("blocks.0", "blocks.1") if blocks else None, watch=watch)
    if blocks:
        for block in model.blocks:
            block.compile(backend=backend)
        results = train(model, model, **how)
    else:
        results = train(torch.compile(model, backend=backend), model, **how)
    if watch is not None:
        watch.close()
    return results


def same(results: list[Tensor], other: list[Tensor]) -> bool:
    return len(results) == len(other) and all(map(torch.equal, results, other))


WAYS = {
    "whole": {},
    "bf16": {"dtype": torch.bfloat16},
    "blocks": {"blocks": True},
    "accumulated": {"micro": 2},
    "checkpointed": {"checkpointed": False},
    "reentrant": {"checkpointed": True, "blocks": True},
}


@pytest.mark.parametrize("way", mostly_slow(WAYS, "accumulated", "blocks", "reentrant"))
def test_the_run_is_the_same(way: str, tmp_path: Path):
    how = WAYS[way]
    assert same(run(None, **how), run(tmp_path / "run.jsonl", **how))
    sampled = samples(tmp_path / "run.jsonl")
    assert [*sampled] == [0, 2]
    for rows in sampled.values():
        assert {*rows} == {*keys()}
        assert {row["calls"] for row in rows.values()} == {how.get("micro", 1)}
        for (_, _, operand), row in rows.items():
            calls = 1 if operand == "w" else how.get("micro", 1)
            assert row["elements"] % (24 * calls) == 0 or operand == "w"
            assert row["elements"] <= 24 * FFN * calls or operand == "w"


def expected(x: Tensor, dim: int) -> dict[str, float]:
    """Statistics of an operand of an MXFP8 GEMM, from the reference that was written from the standard."""
    value = round_trip(x.detach(), dim)
    x = x.detach().float()
    return {
        "amax": float(x.abs().max()),
        "smallest": float(x[x != 0].abs().min()),
        "underflow": float(((value == 0) & (x != 0)).sum().double() / (x != 0).sum()),
        "sqnr": sqnr_db(x, value),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_statistics_are_of_the_operands(dtype: torch.dtype, tmp_path: Path):
    """The input of the first product, all weights and the last output gradient are those of eager."""
    model = nn.Sequential(nn.Linear(WIDTH, FFN), nn.GELU(), nn.Linear(FFN, WIDTH)).to(dtype)
    watch = Watch(tmp_path / "run.jsonl", every=1)
    compiled = torch.compile(model, backend=EagerBackend(root=model, watch=watch, policy=EVERYTHING))
    (compiled(batch(0, dtype).requires_grad_()) * direction(dtype)).sum().backward()
    watch.close()
    first, last = model[0].weight, model[2].weight
    cases = {
        ("0", "fprop", "x"): (batch(0, dtype), -1),
        ("0", "wgrad", "x"): (batch(0, dtype), 0),
        ("0", "fprop", "w"): (first, -1),
        ("0", "dgrad", "w"): (first, 0),
        ("2", "fprop", "w"): (last, -1),
        ("2", "dgrad", "dy"): (direction(dtype), -1),
        ("2", "wgrad", "dy"): (direction(dtype), 0),
    }
    rows = samples(tmp_path / "run.jsonl")[0]
    for key, (operand, dim) in cases.items():
        for name, value in expected(operand, dim).items():
            assert rows[key][name] == pytest.approx(value, rel=1e-9), (key, name)


def test_weights_that_change_and_that_do_not(tmp_path: Path):
    model = nn.Sequential(nn.Linear(WIDTH, FFN, bias=False))
    for rate, least in ((1e-9, 0.0), (0.5, 0.5)):
        torch._dynamo.reset()
        path = tmp_path / f"{rate}.jsonl"
        watch = Watch(path, every=1)
        before = [round_trip(model[0].weight, -1)]
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        compiled = torch.compile(model, backend=EagerBackend(root=model, watch=watch, policy=EVERYTHING))
        for index in range(2):
            compiled(batch(index)).square().sum().backward()
            optimizer.step()
            before.append(round_trip(model[0].weight, -1))
        rows = samples(path)
        assert rows[0]["0", "fprop", "w"]["changed"] is None
        changed = rows[1]["0", "fprop", "w"]["changed"]
        assert changed == float((before[0] != before[1]).double().mean())
        assert changed >= least
        assert bool(changed) == bool(least)


def test_nan_is_counted_where_it_is(tmp_path: Path):
    model, watch = Model(), Watch(tmp_path / "run.jsonl", every=1)
    with torch.no_grad():
        model.blocks[1].up.weight[3, 5] = math.nan
    torch.compile(model, backend=EagerBackend(root=model, watch=watch))(batch(0)).sum().backward()
    watch.close()
    rows = samples(tmp_path / "run.jsonl")[0]
    assert rows["blocks.1.up", "fprop", "w"]["nan"] == 1
    assert rows["blocks.1.up", "fprop", "w"]["poisoned"] == 31
    assert (rows["blocks.1.up", "fprop", "x"]["nan"], rows["blocks.0.down", "fprop", "x"]["nan"]) == (0, 0)
    assert rows["blocks.1.down", "fprop", "x"]["nan"] == 24


def test_layers_and_statistics_are_chosen(tmp_path: Path):
    model, records = Model(), []
    watch = Watch(
        [tmp_path / "run.jsonl", records.append],
        every=1,
        layers="*.up",
        stats=["amax", "scales"],
        start=1,
        stop=2,
    )
    train(torch.compile(model, backend=EagerBackend(root=model, watch=watch)), model, steps=3)
    assert [record["kind"] for record in records] == ["run", "sample"]
    assert records == [*read(tmp_path / "run.jsonl")]
    (rows,) = samples(tmp_path / "run.jsonl").values()
    assert {*rows} == {*keys({"blocks.0.up", "blocks.1.up"})}
    named = {"layer", "gemm", "operand", "role", "format", "calls", "elements"}
    numbers = {"amax", "scale_min", "scale_median", "scale_max"}
    assert all({*row} == named | numbers for row in rows.values())


def test_calls_without_gradients_are_not_watched(tmp_path: Path):
    model, watch = Model(), Watch(tmp_path / "run.jsonl", every=1)
    compiled = torch.compile(model, backend=EagerBackend(root=model, watch=watch))
    with torch.no_grad():
        compiled(batch(0))
    watch.close()
    assert not (tmp_path / "run.jsonl").exists()


def test_samples_have_the_mean_loss_of_a_step(tmp_path: Path):
    model, watch = Model(), Watch(tmp_path / "run.jsonl", every=2)
    compiled = torch.compile(model, backend=EagerBackend(root=model, watch=watch))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for values in ((1.0, 2.0), (5.0,), (float("inf"),), (), ()):
        loss = compiled(batch(0)).square().mean()
        loss.backward()
        for value in values:
            watch.loss(loss * 0 + value if value == 1.0 else value)
        optimizer.step()
    watch.close()
    records = [record for record in read(tmp_path / "run.jsonl") if record["kind"] == "sample"]
    assert [(record["step"], record.get("loss", "none")) for record in records] == [
        (0, 1.5),
        (2, None),
        (4, "none"),
    ]


def test_optimizers_of_other_models_end_no_step(tmp_path: Path):
    model, other, watch = Model(), nn.Linear(3, 3), Watch(tmp_path / "run.jsonl", every=1)
    mine, others = (torch.optim.SGD(target.parameters(), lr=0.0) for target in (model, other))
    compiled = torch.compile(model, backend=EagerBackend(root=model, watch=watch))
    for _ in range(2):
        compiled(batch(0)).sum().backward()
        other(torch.ones(3)).sum().backward()
        others.step()
        assert watch.current_step == 0
    mine.step()
    assert [*samples(tmp_path / "run.jsonl")] == [0]
    compiled(batch(0))
    assert watch.current_step == 1


def test_optimizers_that_step_within_the_backward(tmp_path: Path):
    """The sample of a step is written when its backward is over, with all that the backward has measured."""
    model, watch = Model(), Watch(tmp_path / "run.jsonl", every=1)
    compiled = torch.compile(model, backend=EagerBackend(root=model, watch=watch))
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.zero_grad())
    for step in range(3):
        compiled(batch(step).requires_grad_()).sum().backward()
        sampled = samples(tmp_path / "run.jsonl")
        assert [*sampled] == [*range(step + 1)]
        assert {*sampled[step]} == {*keys()}
        assert {row["calls"] for row in sampled[step].values()} == {1}


def test_a_stored_weight_is_left_out_with_a_reason(tmp_path: Path):
    """What a graph does not cast cannot be measured, and the first record says so."""
    model, watch = Model(), Watch(tmp_path / "run.jsonl", every=1)
    mxcompile.quantize_weights_(model, "inference", args=(batch(0),))
    compiled = torch.compile(model, backend=EagerBackend(root=model, watch=watch))
    compiled(batch(0).requires_grad_()).sum().backward()
    watch.close()
    first = next(iter(read(tmp_path / "run.jsonl")))
    assert {(row["layer"], row["operand"]) for row in first["left_out"]} == {(layer, "w") for layer in LAYERS}
    assert {*first["left_out"][0]} == {"layer", "gemm", "operand", "why"}


def test_watched_results_are_outputs_and_weight_gradients(tmp_path: Path):
    model = nn.Sequential(nn.Linear(WIDTH, FFN, bias=False), nn.GELU(), nn.Linear(FFN, WIDTH, bias=False))
    watch = Watch(tmp_path / "run.jsonl", every=1, operands=["y", "dw"])
    compiled = torch.compile(model, backend=EagerBackend(root=model, watch=watch, policy=EVERYTHING))
    y = compiled(batch(0).requires_grad_())
    (y * direction()).sum().backward()
    y = y.detach()
    watch.close()
    (rows,) = samples(tmp_path / "run.jsonl").values()
    assert {*rows} == {(layer, *row) for layer in "02" for row in (("fprop", "y"), ("wgrad", "dw"))}
    for key, value in {("2", "fprop", "y"): y, ("0", "wgrad", "dw"): model[0].weight.grad}.items():
        assert rows[key]["elements"] == value.numel()
        assert rows[key]["amax"] == float(value.abs().max())
        assert rows[key]["smallest"] == float(value[value != 0].abs().min())
        assert (rows[key]["nan"], rows[key]["inf"]) == (0, 0)
        assert "underflow" not in rows[key]


FRONTS = {
    "torch.compile": lambda model, watch: torch.compile(
        model, backend="mxfp8", options={} if watch is None else {"watch": watch}
    ),
    "mxcompile.compile": lambda model, watch: mxcompile.compile(model, watch=watch),
}


WATCHED = {"operands": OPERANDS[:3], "results": OPERANDS}


@pytest.mark.parametrize("operands", mostly_slow(WATCHED, "operands"))
@pytest.mark.parametrize("front", mostly_slow(FRONTS, "mxcompile.compile"))
def test_compiled_code_is_the_same(front: str, operands: str, tmp_path: Path):
    """Unsampled steps run the code without a watch, and results are equal bits in sampled steps too."""
    results, codes = [], []
    torch._dynamo.utils.counters.clear()
    for watch in (None, Watch(tmp_path / "run.jsonl", every=2, operands=WATCHED[operands])):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Model()
        compiled = FRONTS[front](model, watch)
        with (
            torch._inductor.config.patch(fx_graph_cache=False),
            torch._functorch.config.patch(enable_autograd_cache=False),
        ):
            result, code = run_and_get_code(lambda: train(compiled, model, steps=3))  # noqa: B023
        results.append(result)
        codes.append([re.sub(r"AOT ID: \['\d+_", "", text) for text in code])  # counts in a process
    assert same(*results)
    plain, watched = codes
    assert all("cast_statistics" not in code for code in plain)
    assert {*plain} <= {*watched}
    assert any("cast_statistics" in code for code in {*watched} - {*plain})
    assert len(watched) == 2 * len(plain)
    assert {key for key in samples(tmp_path / "run.jsonl")[2] if key[2] not in ("y", "dw")} == {*keys()}
    assert torch._dynamo.utils.counters["graph_break"] == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every must be an integer of at least 1"),
        ({"start": -1}, "start must be an integer of at least 0"),
        ({"stats": ["amaxx"]}, "did you mean 'amax'"),
        ({"operands": ["dz"]}, "unknown operand 'dz'"),
        ({"to": ""}, "expected a path, a callable or a SummaryWriter"),
    ],
)
def test_watch_refuses_wrong_arguments(arguments: dict[str, Any], message: str):
    with pytest.raises(OptionError, match=message):
        Watch(**{"to": "run.jsonl", **arguments})


def test_the_option_is_a_path_or_a_watch():
    with pytest.raises(
        OptionError, match="option 'watch' must be a file path, 'nonfinite' or a Watch, found 3"
    ):
        mxcompile.Backend(watch=3)  # type: ignore[arg-type]


def test_two_models_with_layers_of_one_name_warn_that_rows_mix_them(caplog: pytest.LogCaptureFixture):
    watch = mxcompile.Watch(lambda record: None, every=1)
    for model in (nn.Sequential(nn.Linear(64, 64)), nn.Sequential(nn.Linear(64, 64))):
        torch.compile(model, backend=EagerBackend(policy=EVERYTHING, watch=watch))(torch.randn(64, 64))
    watch.close()
    assert sum("rows of a layer mix them: 0;" in text for text in caplog.messages) == 1
