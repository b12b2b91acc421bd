"""One rank of a mesh: its shards, its decisions beside those of the whole model, what it sends."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import meshed
import pytest
import torch.distributed as dist
from meshed import FFN, TOKENS, WIDTH, WORDS, decisions
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mxcompile
from mxcompile.cli import main
from mxcompile.errors import ModelError, OptionError
from mxcompile.mesh import RankReport

NAMED = {"policy": "nvidia", "target": "cpu"}


@pytest.fixture(scope="module")
def whole() -> mxcompile.Report:
    model, args, _ = meshed.plain(6)
    return mxcompile.explain(model, *args, **NAMED)


@pytest.fixture(scope="module")
def deep() -> RankReport:
    return mxcompile.explain_rank(meshed.deep, mesh="dp=128,tp=4", **NAMED)


def test_names_and_decisions_are_those_of_the_whole(whole: mxcompile.Report, deep: RankReport):
    assert decisions(deep.report) == decisions(whole)
    assert not deep.warnings
    assert not any("in the whole model" in note for shard in deep.shards for note in shard.notes)


def test_every_split_layer_is_a_shard(deep: RankReport):
    sizes = {
        (shard.name, shard.gemm): (shard.whole, shard.local)
        for shard in deep.shards
        if shard.name in ("layers.3.feed_forward.w1", "layers.4.feed_forward.w2")
    }
    part = FFN // 4
    assert sizes == {
        ("layers.3.feed_forward.w1", "fprop"): ((TOKENS, FFN, WIDTH), (TOKENS, part, WIDTH)),
        ("layers.3.feed_forward.w1", "dgrad"): ((TOKENS, WIDTH, FFN), (TOKENS, WIDTH, part)),
        ("layers.3.feed_forward.w1", "wgrad"): ((FFN, WIDTH, TOKENS), (part, WIDTH, TOKENS)),
        ("layers.4.feed_forward.w2", "fprop"): ((TOKENS, WIDTH, FFN), (TOKENS, WIDTH, part)),
        ("layers.4.feed_forward.w2", "dgrad"): ((TOKENS, FFN, WIDTH), (TOKENS, part, WIDTH)),
        ("layers.4.feed_forward.w2", "wgrad"): ((WIDTH, FFN, TOKENS), (WIDTH, part, TOKENS)),
    }
    assert len({shard.name for shard in deep.shards}) == 6 * 7 + 1


def test_cut_blocks_are_noted(deep: RankReport):
    """160 features are five blocks, and 40 of them one and a part; 32 of 128 are one."""
    cut = {
        (shard.name.partition(".")[2].partition(".")[2], shard.gemm) for shard in deep.shards if shard.notes
    }
    assert cut == {("feed_forward.w2", "fprop"), ("feed_forward.w1", "dgrad"), ("feed_forward.w3", "dgrad")}
    note = next(shard.notes for shard in deep.shards if shard.notes)
    assert note == ("the shard cuts blocks: its k, 40, is not a multiple of 32",)


def test_a_size_limit_that_only_the_shard_falls_under_is_noted():
    policy = {
        "version": 1,
        "rules": [{"match": {"max_n": 64}, "use": "bf16"}, {"match": {"min_n": 65}, "use": "mxfp8"}],
    }
    rank = mxcompile.explain_rank(meshed.sp, mesh="tp=4", policy=policy, strict=False, target="cpu")
    (shard,) = (s for s in rank.shards if (s.name, s.gemm) == ("layers.0.attention.wq", "fprop"))
    assert any(note.startswith("a layer of the shard's size would be bf16") for note in shard.notes)
    (gemm,) = (g for g in rank.report.gemms if (g.name, g.gemm) == ("layers.0.attention.wq", "fprop"))
    assert (gemm.precision, gemm.n) == ("mxfp8", WIDTH // 4)


@pytest.mark.slow
def test_folded_layers_send_as_often_as_all(deep: RankReport, monkeypatch: pytest.MonkeyPatch):
    from mxcompile.analysis.explain import rank
    from mxcompile.plan.repeats import keep_all

    monkeypatch.setattr(rank, "some_or_all", lambda _, traced: traced(keep_all))
    unfolded = mxcompile.explain_rank(meshed.deep, mesh="dp=128,tp=4", **NAMED)
    assert Counter(deep.collectives) == Counter(unfolded.collectives)
    assert set(deep.shards) == set(unfolded.shards)


def test_fsdp2_gathers_in_its_dtype_and_reduces_in_another():
    rank = mxcompile.explain_rank(meshed.fsdp, mesh="dp=8", **NAMED)
    assert not rank.shards
    block = 4 * WIDTH * WIDTH + 3 * FFN * WIDTH + 2 * WIDTH
    ends = 2 * WORDS * WIDTH + WIDTH
    rows = Counter((c.kind, c.name, c.phase, c.dtype, c.num_bytes, c.axis, c.ranks) for c in rank.collectives)
    expected = {("all-gather", "", "forward", "bfloat16", ends // 8 * 2, "dp", 8): 1,
                ("reduce-scatter", "", "backward", "float32", ends * 4, "dp", 8): 1}  # fmt: skip
    for name in ("layers.0", "layers.1"):
        expected |= {
            ("all-gather", name, phase, "bfloat16", block // 8 * 2, "dp", 8): 1
            for phase in ("forward", "backward")
        }
        expected[("reduce-scatter", name, "backward", "float32", block * 4, "dp", 8)] = 1
    assert rows == expected
    assert rank.wire_bytes == sum(key[4] * times for key, times in expected.items())


def test_memory_is_that_of_shards_and_of_gathered_groups():
    rank = mxcompile.explain_rank(meshed.fsdp, mesh="dp=8", **NAMED)
    block = 4 * WIDTH * WIDTH + 3 * FFN * WIDTH + 2 * WIDTH
    ends = 2 * WORDS * WIDTH + WIDTH
    shards = (2 * block + ends) // 8 * 4
    memory = rank.memory
    assert (memory.parameters, memory.gradients, memory.optimizer) == (shards, shards, 2 * shards)
    assert memory.forward.gathered == 2 * ends + 2 * 2 * block
    waiting = 2 * WORDS * WIDTH  # the head's gradient, until the embedding has its own
    assert memory.backward.gathered == 2 * ends + 2 * 2 * block + (2 + 4) * block + waiting
    assert memory.loss.working == 2 * 2 * TOKENS * WORDS
    assert memory.total == memory.parameters + memory.optimizer + memory.backward.total
    assert memory.saved == rank.report.summary.saved_bytes


def test_saved_bytes_of_folded_layers_match_the_report(deep: RankReport):
    """Six layers, of which three are traced: all are there at the begin of backward, or their gradients."""
    assert deep.memory.saved == deep.memory.loss.saved == deep.report.summary.saved_bytes
    assert 0.9 * deep.memory.saved < max(deep.memory.forward.saved, deep.memory.backward.saved)


def test_weights_that_travel_in_mxfp8_are_counted_beside_bf16():
    """Two ranks have 80 rows of w1 and w3, which are not whole tiles."""
    rank = mxcompile.explain_rank(meshed.gathers, mesh="dp=2", policy=meshed.TILES, target="cpu")
    blocks = [c for c in rank.collectives if c.kind == "all-gather" and c.name]
    tiles, rest = (4 * WIDTH * WIDTH + FFN * WIDTH) // 2, FFN * WIDTH + WIDTH
    assert {(c.dtype, c.without_bytes) for c in blocks} == {("uint8", 2 * (tiles + rest))}
    assert {c.num_bytes for c in blocks} == {tiles + tiles // 1024 + 2 * rest}


def test_plain_models_are_parallelised_by_name():
    model, args, _ = meshed.plain()
    rank = mxcompile.explain_rank(model, *args, mesh="dp=4,tp=2", parallel="fsdp,tp=llama", **NAMED)
    kinds = Counter((c.kind, c.what, c.axis, c.phase) for c in rank.collectives)
    assert kinds["all-reduce", "activations", "tp", "forward"] == 2 * 2 + 1
    assert kinds["all-gather", "weights", "dp", "forward"] == 3
    assert {shard.name for shard in rank.shards if shard.gemm == "fprop"} == {
        *(f"layers.{i}.attention.{name}" for i in range(2) for name in ("wq", "wk", "wv", "wo")),
        *(f"layers.{i}.feed_forward.{name}" for i in range(2) for name in ("w1", "w2", "w3")),
        "output",
    }
    assert type(model.output.weight) is nn.Parameter


def test_inference_gathers_weights_in_forward_only():
    rank = mxcompile.explain_rank(meshed.fsdp, mesh="dp=8", training=False, **NAMED)
    assert {c.phase for c in rank.collectives} == {"forward"}


def own_mesh():
    """A factory that makes its mesh itself, in the process that is a rank already."""
    model, args, kwargs = meshed.plain()
    fully_shard(model, mesh=init_device_mesh("cpu", (8,), mesh_dim_names=("dp",)))
    return model, args, kwargs


def own_group(mesh: Any):
    dist.init_process_group("gloo", rank=0, world_size=1)


@pytest.mark.parametrize(
    ("model", "settings", "error", "words"),
    [
        (meshed.plain, {}, ModelError, "is not parallelised"),
        (lambda mesh: meshed.plain()[0], {}, ModelError, "returned Llama"),
        (own_group, {}, ModelError, "initialize the default process group twice"),
        (nn.Linear(4, 4), {"parallel": "tp=llama"}, OptionError, "needs a mesh with the axis tp"),
        (nn.Linear(4, 4), {"parallel": "zero"}, OptionError, "unknown way"),
        (nn.Linear(4, 4), {"parallel": "ep"}, OptionError, "needs a mesh with the axis ep"),
        (nn.Linear(4, 4), {"parallel": "ep", "mesh": "ep=2"}, OptionError, "finds no experts"),
        (nn.Linear(4, 4), {"parallel": "ep,tp=llama", "mesh": "ep=2"}, OptionError, "cannot be combined"),
        (nn.Linear(4, 4), {"parallel": "tp=llama", "mesh": "tp=2"}, OptionError, "finds no layer of a Llama"),
    ],
)
def test_explain_rank_refuses_wrong_arguments(
    model: Any, settings: dict[str, Any], error: type[Exception], words: str
):
    with pytest.raises(error, match=words):
        mxcompile.explain_rank(model, **{"mesh": "dp=8", **settings})
    assert not dist.is_initialized()


def test_a_factory_may_make_its_mesh():
    assert {c.ranks for c in mxcompile.explain_rank(own_mesh, mesh="dp=8", **NAMED).collectives} == {8}


def test_explain_names_the_function_and_the_command_for_a_rank(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(OptionError, match=r"call explain_rank\(…, mesh=…\) for a rank of a mesh"):
        mxcompile.explain(nn.Linear(4, 4), mesh="dp=8")
    for flags in (["--mesh", "tp=2"], ["--sweep", "--ranks", "8"]):
        with pytest.raises(SystemExit) as status:
            main(["explain", "meshed:sp", *flags])
        assert status.value.code == 2
        assert "mxcompile mesh MODEL dp=128,tp=8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["8"], "meshes of a number of ranks are sorted by time: give --links"),
        (["8", "--links", "net=50", "--schedule", "GPipe"], "no pipeline: leave out --schedule"),
        (["8", "--links", "net=50", "-o", "meshes.html"], "unknown suffix '.html'"),
        (["tp=2", "--memory", "80"], "and this is one mesh: leave out --memory"),
        (["tp=2", "-o", "rank.png"], "unknown suffix '.png'"),
        (
            ["tp=2", "--length", "64"],
            "a factory sets the sizes and dtype of its model itself: leave out --length",
        ),
        (["tp=2", "--node", "4"], "--node needs the speeds of links: give --links"),
        (["tp=2", "--schedule", "GPipe"], "--schedule needs a pipeline: give the mesh an axis pp"),
        (["tp"], "expected axes with their sizes, such as dp=128,tp=8"),
    ],
)
def test_mesh_command_refuses_wrong_flags(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(meshed.__file__.rpartition("/")[0])
    assert main(["mesh", "meshed:sp", "--target", "b200", *flags]) == 2
    assert words in capsys.readouterr().err


def test_mesh_command_writes_one_rank_as_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(meshed.__file__.rpartition("/")[0])
    file = tmp_path / "rank.json"
    assert main(["mesh", "meshed:sp", "tp=2", "--target", "cpu", "-o", str(file)]) == 0
    data = json.loads(file.read_text())
    assert (data["kind"], data["mesh"], data["ranks"], len(data["collectives"])) == ("rank", "tp=2", 2, 21)


def test_the_text_has_one_row_for_equal_layers(deep: RankReport):
    text = str(deep)
    assert "one rank of dp=128,tp=4 (512 ranks)" in text
    assert "layers.0-5.feed_forward.w1" in text
    assert text.count("reduce-scatter  gradients") == 3
