"""The summary: shares, sums over graphs, and how they are said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_reports import kept, record, report, training

from mxcompile.report import GemmRecord, Part, Report, Summary
from mxcompile.report.merge import latest


def test_flop_share_is_of_multiply_adds():
    half = [record(m=2, n=3, k=5), kept(m=3, n=5, k=2)]
    assert [gemm.flops for gemm in half] == [60, 60]
    assert report(*half).summary.flop_share == 0.5
    batched = replace(half[0], batch=3)
    assert batched.flops == 180
    assert report(batched, half[1]).summary.flop_share == 0.75


@pytest.mark.parametrize(
    ("gemms", "share"),
    [([], 0), ([kept()], 0), ([record()], 1), ([record(m=0)], 0), ([record(m=0), kept()], 0)],
)
def test_flop_share_at_its_ends(gemms: list[GemmRecord], share: float):
    assert report(*gemms).summary.flop_share == share


def merged(*parts: Part) -> Summary:
    return Report.from_parts(parts, target="sm_100", policy="p.yaml").summary


def test_figures_of_parts_add_up_in_the_summary():
    part = Part(
        gemms=(record(),),
        saved_bytes=1,
        saved_bytes_bf16=2,
        weights=(("up", 3, 4, 2),),
        pass_time_us=5.0,
        graph_breaks=1,
        cache="miss",
        warnings=("same",),
    )
    other = replace(
        part, gemms=(kept(), kept()), weights=(("head", 3, 4, 2),), warnings=("same", "new"), pass_time_us=6.0
    )
    assert merged(part, other) == Summary(
        target="sm_100",
        policy="p.yaml",
        num_gemms=3,
        flop_share=1 / 3,
        saved_bytes=2,
        saved_bytes_bf16=4,
        weight_bytes=6,
        weight_bytes_bf16=8,
        weight_bytes_quantized=4,
        pass_time_us=11.0,
        graphs=2,
        graph_breaks=2,
        cache="miss",
        warnings=("same", "new"),
    )


def test_work_is_that_of_training_and_of_all_that_run_the_code():
    figures = {"saved_bytes": 1, "casts": 6, "wire_bytes": 33, "wire_bytes_bf16": 64}
    block = Part(gemms=(record("layers.0.up"),), prefix="layers.0", **figures)
    alone = merged(block)
    assert (alone.casts, alone.wire_bytes, alone.wire_bytes_bf16) == (6, 33, 64)
    evaluation = replace(block, saved_bytes=None, casts=2)
    assert merged(block, evaluation).casts == 6
    assert merged(evaluation).casts == 2
    shared = replace(block, twins=(("layers.1", None), ("layers.2", None)))
    assert (merged(shared).casts, merged(shared).wire_bytes) == (18, 99)
    assert merged(shared, replace(block, gemms=(record("layers.2.up"),), prefix="layers.2")).casts == 18


def test_modules_that_share_code_have_the_records_of_every_part_that_they_run():
    path = "layers.0"
    twins = ("layers.1", None), ("layers.2", None)
    first = Part(gemms=tuple(training("layers.0.up")), prefix=path, saved_bytes=1)
    others = Part(gemms=tuple(training("layers.1.up")), prefix="layers.1", twins=twins[1:], saved_bytes=1)
    called = Part(gemms=(record("layers.0.up"),), prefix=path, twins=twins)
    one_row = Part(gemms=(record("layers.0.up", m=1),), prefix=path, twins=twins)
    for parts in ((first, others, called), (called, first, others), (first, others, called, one_row)):
        gemms = Report.from_parts(latest([(0, (part,)) for part in parts]), target="cpu", policy="p").gemms
        for layer in (0, 2):
            of_layer = [(gemm.gemm, gemm.m) for gemm in gemms if gemm.name == f"layers.{layer}.up"]
            expected = [("fprop", 1)] * (one_row in parts)
            assert sorted(of_layer) == [("dgrad", 64), *expected, ("fprop", 64), ("wgrad", 64)]


def test_text_shows_casts_and_sent_bytes():
    casts = {"casts": 44, "saved_bytes": 1, "saved_bytes_bf16": 2}
    assert "\ncasts per run: 44\n" in str(report(record(), **casts))
    sent = str(report(record(), wire_bytes=33, wire_bytes_bf16=64))
    assert "sent by each rank: 33 B (52% of 64 B without mxcompile)\n" in sent
    assert "sent by each rank: 64 B\n" in str(report(record(), wire_bytes=64, wire_bytes_bf16=64))


def test_records_know_their_graph():
    parts = [Part(gemms=(record("a"), record("b"))), Part(gemms=()), Part(gemms=(record("c"),))]
    gemms = Report.from_parts(parts, target="cpu", policy="p").gemms
    assert [(gemm.name, gemm.graph) for gemm in gemms] == [("a", 0), ("b", 0), ("c", 2)]


@pytest.mark.parametrize(
    ("states", "state"),
    [
        ([], "off"),
        (["off", "off"], "off"),
        (["hit", "hit"], "hit"),
        (["miss"], "miss"),
        (["hit", "miss", "hit"], "partial"),
    ],
)
def test_cache_state_of_several_graphs(states: list[str], state: str):
    assert merged(*(Part(cache=cache) for cache in states)).cache == state


def test_inference_report_has_no_saved_bytes():
    assert merged(Part(), Part()).saved_bytes is None
    assert "saved for backward" not in str(report(record()))


def test_graphs_that_run_without_gradients_do_not_count_as_saving_nothing():
    summary = merged(Part(), Part(saved_bytes=0, saved_bytes_bf16=8))
    assert (summary.saved_bytes, summary.saved_bytes_bf16) == (0, 8)


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (1, "1 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"),
        (3 << 50, "3072.0 TiB"),
    ],
)  # fmt: skip
def test_text_shows_weight_bytes_with_a_unit(num_bytes: int, words: str):
    assert f"weights of linear layers: {words}\n" in str(report(weights=(("up", *[num_bytes] * 3),)))


def test_a_graph_without_products_stands():
    """It counts among the graphs; a part whose records a later compile repeats does not."""
    part, empty = Part(gemms=(record(),)), Part(graph_breaks=1)
    assert latest([("frame", [part, empty]), ("frame", [part])]) == (empty, part)
