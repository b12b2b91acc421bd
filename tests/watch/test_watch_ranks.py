"""Samples of two Gloo ranks: one file, whose rows are of all that the ranks cast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.eager_backend import EagerBackend
from helpers.ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from watched_models import FFN, WIDTH, Model, batch, fully_sharded, keys, samples, tensor_parallel

from mxcompile import ops
from mxcompile.errors import WatchError
from mxcompile.watch import Watch, ranks, read
from mxcompile.watch.tally import Tally

RANKS, ROWS = 2, 24


def data_parallel(model: Model) -> nn.Module:
    return DistributedDataParallel(model)


def one_rank_alone(model: Model) -> nn.Module:
    """Rank 1 has no layer that is watched, as a stage of a pipeline may not have."""
    return model if dist.get_rank() == 0 else nn.Identity()


def train(wrap: Callable[[Model], nn.Module]) -> None:
    ranks._WAIT_S = 5.0 if wrap is one_rank_alone else 60.0
    torch.manual_seed(0)
    model, rank = Model(), dist.get_rank()
    watch = Watch("run.jsonl", every=2)
    wrapped = wrap(model)
    compiled = torch.compile(wrapped, backend=EagerBackend(root=model, watch=watch))
    parameters = [*wrapped.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1) if parameters else None
    for step in range(3):
        result = compiled(batch(step * RANKS + (0 if wrap is tensor_parallel else rank)).requires_grad_())
        result.square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    watch.close()
    dist.barrier()


def two_ranks(wrap: Callable[[Model], nn.Module], folder: Path) -> Any:
    on_ranks(RANKS, folder, train, wrap, apart=True)
    return samples(folder / "run.jsonl")


def senders(folder: Path) -> set[int]:
    """How many ranks the samples are of."""
    return {record["ranks"] for record in read(folder / "run.jsonl") if record["kind"] == "sample"}


class Place:
    """Ranks of one process, in turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank, store = 0, dist.HashStore()
        monkeypatch.setattr(ranks, "_rank_and_size", lambda: (self.rank, RANKS))
        monkeypatch.setattr(ranks, "_store", lambda: store)
        monkeypatch.setattr(ranks, "_WAIT_S", 0.5)


def sample(amax: float) -> ranks.Sample:
    numbers = [amax, amax, 4.0, 4.0, *[0.0] * (ops.watch.LENGTH - 4)]
    return {("up", "fprop", "x"): Tally.from_numbers("ffn_in", "e4m3 1x32 rceil", numbers)}


def test_first_rank_joins_samples_of_all_other_ranks(monkeypatch: pytest.MonkeyPatch):
    rank, written, warned, reports = Place(monkeypatch), [], [], []
    first, second = (
        ranks.Ranks("a", lambda *of: written.append(of), lambda *of: warned.append(of), reports.append)
        for _ in "ab"
    )
    rank.rank = 1
    second.send_to_first({"kind": "nonfinite", "rank": 1})
    for step in range(3):
        if step < 1:
            rank.rank = 1
            second.gather(step, sample(7.0))
        rank.rank = 0
        first.gather(step, sample(3.0))
    first.close()
    assert [(step, sent) for step, _, sent in written] == [(0, 2), (1, 1), (2, 1)]
    joined = written[0][1]["up", "fprop", "x"]
    assert (joined.calls, joined.sums["amax"], joined.sums["smallest"], joined.sums["elements"]) == (
        2,
        7,
        3,
        8,
    )
    ((warning, error),) = warned
    assert (warning, str(error)) == ("samples lack some ranks", "ranks [1] sent nothing")
    assert reports == [{"kind": "nonfinite", "rank": 1}]


def test_all_ranks_receive_the_rules_that_fired(monkeypatch: pytest.MonkeyPatch):
    """Of the joined sample; a rank that was silent is heard when it sends again."""
    rank, warned = Place(monkeypatch), []

    def judged(sample: ranks.Sample) -> list[Any]:
        return [(0, {"amax": tally.sums["amax"]}) for tally in sample.values()]

    first, second = (
        ranks.Ranks("a", lambda *of: None, lambda *of: warned.append(of), print, judged) for _ in "ab"
    )
    assert first.gather(0, sample(3.0)) == [(0, {"amax": 3.0})]
    monkeypatch.setattr(second, "_receive_rules", lambda *key: [])
    rank.rank = 1
    second.gather(1, sample(7.0))
    rank.rank = 0
    assert first.gather(1, sample(3.0)) == [(0, {"amax": 7.0})]
    monkeypatch.delattr(second, "_receive_rules")
    rank.rank = 1
    assert second._receive_rules("mxcompile_watch/a/0/1", 1) == [(0, {"amax": 7.0})]
    assert len(warned) == 1


def test_rules_of_an_earlier_sample_of_a_step_are_not_obeyed(monkeypatch: pytest.MonkeyPatch):
    """A run that resumes samples a step again, as does a step that GradScaler skips."""
    rank, warned = Place(monkeypatch), []
    monkeypatch.setattr(ranks, "_WAIT_S", 0.05)

    def judged(sample: ranks.Sample) -> list[Any]:
        return [(0, {"amax": tally.sums["amax"]}) for tally in sample.values()]

    first, second = (
        ranks.Ranks("a", lambda *of: None, lambda *of: warned.append(of), print, judged) for _ in "ab"
    )
    first.gather(3, sample(7.0))
    rank.rank = 1
    assert second.gather(3, sample(1.0)) == [(0, {"amax": 7.0})]
    assert second.gather(3, sample(1.0)) == []
    ((_, first_warning), (_, warning)) = warned
    assert "sent nothing" in str(first_warning)
    assert str(warning) == "the first rank did not send the results of its rules for step 3"
    rank.rank = 0
    assert first.gather(3, sample(2.0)) == [(0, {"amax": 2.0})]


def trained(watch: Watch, scales: list[float], width: int) -> Iterator[str]:
    """Trains products of `width` under `watch`, a step for each of `scales`. Yields the state after each."""
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    compiled = torch.compile(model, backend=EagerBackend(watch=watch))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for scale in scales:
        compiled(torch.full((ROWS, width), scale)).square().mean().backward()
        try:
            optimizer.step()
        except WatchError:
            yield "stopped"
            return
        optimizer.zero_grad()
        yield "done"


STEPS, WIDTHS = 4, {"wide": 64, "narrow": 32}


def watches() -> Any:
    """Two watches at once, then two runs with rules, then two runs with a NaN on rank 1."""
    kept: dict[str, list[Any]] = {name: [] for name in (*WIDTHS, "records")}
    at_once = {name: Watch(kept[name].append, every=1) for name in WIDTHS}
    runs = [trained(watch, [1.0] * STEPS, WIDTHS[name]) for name, watch in at_once.items()]
    assert len([*zip(*runs, strict=True)]) == STEPS
    for watch in at_once.values():
        watch.close()
    ends = []
    for scale in (1e3, 1.0):
        rule = {"when": {"amax": "> 50"}, "operand": "x", "do": "stop"}
        (*_, end) = trained(Watch(every=1, rules=[rule]), [1.0, scale], 32)
        ends.append(end)
    bad = float("nan") if dist.get_rank() else 1.0
    for _ in range(2):
        watch = Watch(kept["records"].append, every=None, nonfinite="warn")
        assert [*trained(watch, [bad], 32)] == ["done"]
        dist.barrier()
        watch.close()
    sizes = {
        name: [
            (record["ranks"], {row["elements"] for row in record["rows"] if row["operand"] == "x"})
            for record in kept[name]
            if record["kind"] == "sample"
        ]
        for name in WIDTHS
    }
    return sizes, ends, [(record["kind"], record["rank"]) for record in kept["records"]]


@pytest.mark.slow
def test_watches_of_one_process_group_stay_apart(tmp_path: Path):
    first, second = on_ranks(RANKS, tmp_path, watches)
    sizes, ends, records = first
    assert sizes == {name: [(RANKS, {RANKS * ROWS * width})] * STEPS for name, width in WIDTHS.items()}
    assert ends == second[1] == ["stopped", "done"]
    assert records == [("nonfinite", 1)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [data_parallel, fully_sharded], ids=lambda wrap: wrap.__name__)
def test_data_parallel_sample_counts_tokens_of_both_ranks(wrap: Any, tmp_path: Path):
    sampled = two_ranks(wrap, tmp_path)
    assert [*sampled] == [0, 2]
    assert {*sampled[0]} == {*keys()}
    assert senders(tmp_path) == {RANKS}
    torch.manual_seed(0)
    model = Model()
    both = torch.cat([model.blocks[0].norm(batch(rank)) for rank in range(RANKS)]).detach()
    row = sampled[0]["blocks.0.up", "fprop", "x"]
    assert (row["elements"], row["calls"]) == (RANKS * ROWS * WIDTH, RANKS)
    assert row["amax"] == pytest.approx(float(both.abs().max()), rel=1e-5)
    weight = sampled[0]["blocks.0.up", "fprop", "w"]
    assert weight["amax"] == float(model.blocks[0].up.weight.detach().abs().max())
    assert 0 < sampled[2]["blocks.0.up", "fprop", "w"]["changed"] <= 1


@pytest.mark.slow
def test_tensor_parallel_sample_counts_shards_as_one_weight(tmp_path: Path):
    sampled = two_ranks(tensor_parallel, tmp_path)
    torch.manual_seed(0)
    weight = Model().blocks[0].up.weight.detach()
    row = sampled[0]["blocks.0.up", "fprop", "w"]
    assert row["elements"] == weight.numel()
    assert row["amax"] == float(weight.abs().max())
    assert sampled[0]["blocks.0.down", "fprop", "x"]["elements"] == ROWS * FFN


@pytest.mark.slow
def test_a_rank_without_layers_is_not_waited_for_twice(tmp_path: Path):
    assert [*two_ranks(one_rank_alone, tmp_path)] == [0, 2]
    assert senders(tmp_path) == {1}
