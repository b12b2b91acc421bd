"""Report files: whole or not at all, one per rank or one for all, and never the end of a training run."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import multiprocessing
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.eager_backend import EagerBackend
from helpers.made import Made
from helpers.policies import policy, rule
from made_reports import kept, record, report, training
from torch import nn

import mxcompile
from mxcompile.cli import main
from mxcompile.compiler.session.options import Options
from mxcompile.errors import OptionError, PolicyError
from mxcompile.publish import publish
from mxcompile.report import FORMS, REGISTRY, Ledger, Part, Report, Summary, files
from mxcompile.report.registry import Registry


def step(path: Path | None = None) -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    torch.compile(model, backend=EagerBackend(report=path))(torch.randn(4, 64)).sum().backward()


def test_a_path_that_cannot_be_written_is_an_error_before_anything_is_compiled(tmp_path: Path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.json").mkdir()
    for path, why in (
        (tmp_path / "file" / "mx.json", "Not a directory|File exists"),
        (tmp_path / "folder.json", "Is a directory"),
        (tmp_path / f"{'x' * 300}" / "mx.json", "File name too long"),
        (Path("/proc/mx.json"), "No such file|Permission denied|not permitted"),
    ):
        with pytest.raises(OptionError, match=rf"report '.*' cannot be written: .*({why})"):
            Options.parse(None, {"report": path})
        with pytest.raises(OptionError, match=why):
            report(*training("a")).save(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder.json"]


def test_checking_a_path_leaves_no_file_and_keeps_the_old_one(tmp_path: Path):
    old = tmp_path / "mx.json"
    old.write_text("old")
    Options.parse(None, {"report": old})
    Options.parse(None, {"report": tmp_path / "new" / "mx.json"})
    assert [p.name for p in tmp_path.rglob("*")] == ["mx.json"]
    assert old.read_text() == "old"


@pytest.mark.parametrize("name", ["mx_{rnk}.json", "{local_rank}/mx.json"])
def test_a_placeholder_that_is_not_known(tmp_path: Path, name: str):
    with pytest.raises(OptionError, match=r"unknown placeholder .* allowed: {rank}"):
        Options.parse(None, {"report": tmp_path / name})


def full(path: Path, content: bytes) -> None:
    """Of a disk that has room for ten bytes."""
    with path.open("wb") as file:
        file.write(content[:10])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_up_is_a_warning_and_the_old_file_stays(tmp_path: Path, caplog):
    path = tmp_path / "mx.json"
    step(path)
    before = path.read_text()

    with caplog.at_level(logging.WARNING, "mxcompile.report"), mock.patch.object(Path, "write_bytes", full):
        step(path)
    warnings = [r.message for r in caplog.records if "cannot write the report" in r.message]
    assert len(warnings) == 1
    assert "No space left on device" in warnings[0]
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["mx.json"]


def test_a_form_that_cannot_be_made_does_not_end_a_compile(tmp_path: Path, caplog):
    with (
        caplog.at_level(logging.WARNING, "mxcompile.report"),
        mock.patch.dict(FORMS, {".txt": mock.Mock(side_effect=RuntimeError("no text"))}),
    ):
        step(tmp_path / "mx.txt")
    assert any("no text" in r.message for r in caplog.records)


def test_a_file_behind_a_link_is_written_and_the_link_stays(tmp_path: Path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "mx.json"
    link.symlink_to(tmp_path / "real" / "mx.json")
    report(*training("a")).save(link)
    assert link.is_symlink()
    assert Report.load(tmp_path / "real" / "mx.json") == report(*training("a"))


def _write(path: Path, name: str, times: int) -> None:
    saved = report(*(record(f"{name}.{i}") for i in range(300)))
    for _ in range(times):
        saved.save(path)


def test_processes_that_write_one_file_do_not_spoil_it(tmp_path: Path):
    path = tmp_path / "mx.json"
    _write(path, "first", 1)
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(path, name, 40)) for name in "ab"]
    for writer in writers:
        writer.start()
    reads = 0
    while any(writer.is_alive() for writer in writers):
        assert len({gemm.name.split(".")[0] for gemm in Report.load(path).gemms}) == 1
        reads += 1
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert reads > 1
    assert [p.name for p in tmp_path.iterdir()] == ["mx.json"]


def test_publish_of_text_that_is_not_utf8_leaves_no_file(tmp_path: Path):
    with pytest.raises(UnicodeEncodeError):
        publish(tmp_path / "mx.txt", "module \udc80")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_the_old_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "policy.yaml"
    mxcompile.Policy.preset("ocp").dump(file)
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(PolicyError, match="No space left"):
        mxcompile.Policy.preset("nvidia").dump(file)
    assert [*tmp_path.iterdir()] == [file]
    assert mxcompile.Policy.load(file).base.name == "ocp"


def test_a_rank_writes_its_own_file_or_none(tmp_path: Path, monkeypatch):
    rank_path, common = tmp_path / "{rank}" / "mx_{rank}.json", tmp_path / "mx.json"
    assert files.of_rank(rank_path) == tmp_path / "0" / "mx_0.json"
    for rank in ("0", "3"):
        monkeypatch.setenv("RANK", rank)
        assert files.of_rank(rank_path) == tmp_path / rank / f"mx_{rank}.json"
        assert Ledger(target="", policy="", path=rank_path).path == tmp_path / rank / f"mx_{rank}.json"
        assert Ledger(target="", policy="", path=common).path == (common if rank == "0" else None)


def test_a_compile_on_a_rank(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("RANK", "5")
    step(tmp_path / "mx_{rank}.json")
    step(tmp_path / "mx.json")
    assert [p.name for p in tmp_path.iterdir()] == ["mx_5.json"]
    assert Report.load(tmp_path / "mx_5.json") == mxcompile.reports()[0]


def test_equal_ranks_are_one_report():
    single = report(*training("layers.0.up"), kept(), saved_bytes=10, saved_bytes_bf16=20, graph_breaks=1)
    assert Report.merged([single, single, single]) == single


def test_merged_report_has_the_layers_of_all_stages():
    first = report(*training("layers.0.up", k=64), saved_bytes=10, saved_bytes_bf16=20, warnings=("a",))
    second = report(*training("layers.1.up"), kept(), saved_bytes=3, saved_bytes_bf16=4, warnings=("a", "b"))
    both = Report.merged([first, second])
    assert [(g.name, g.gemm, g.graph) for g in both.gemms] == [
        *(("layers.0.up", gemm, 0) for gemm in ("fprop", "dgrad", "wgrad")),
        *(("layers.1.up", gemm, 1) for gemm in ("fprop", "dgrad", "wgrad")),
        ("lm_head", "fprop", 1),
    ]
    summary = both.summary
    assert (summary.num_gemms, summary.graphs, summary.warnings) == (7, 2, ("a", "b"))
    assert (summary.saved_bytes, summary.saved_bytes_bf16) == (13, 24)
    assert summary.flop_share == pytest.approx((64 + 32) * 3 / ((64 + 32) * 3 + 32))
    assert len(both.graph) == 2


def test_every_figure_of_a_merged_report_is_a_sum():
    """Also those that explain alone has: they were left out."""
    types = {field.name: field.type for field in dataclasses.fields(Summary)}
    of_records = {"num_gemms", "flop_share", "estimate_us", "estimate_bf16_us"}
    names = [name for name, kind in types.items() if "int" in kind or "float" in kind]
    figures = {name: index + 1 for index, name in enumerate(names) if name not in of_records}
    assert {"peak_bytes", "parameter_bytes", "gradient_bytes", "saved_bytes"} <= figures.keys()
    first, other = (Report(gemms=(*training(name),), summary=Summary(**figures)) for name in ("a", "b"))
    merged = Report.merged([first, other]).summary
    assert {name: getattr(merged, name) for name in figures} == {name: 2 * n for name, n in figures.items()}


def test_compiled_records_of_a_rank_replace_planned_records_of_another():
    plan = [*training("0.up"), *training("1.up")]
    parts = [Part(gemms=(*training(f"{i}.up", kernel="mm"),)) for i in range(2)]
    stages = [Report.from_parts([part], target="", policy="", planned=plan) for part in parts]
    assert [g.kernel for g in stages[1].gemms] == ["not compiled yet"] * 3 + ["mm"] * 3
    assert (stages[1].summary.graphs, stages[1].summary.flop_share) == (1, 0.5)
    assert stages[1].summary.warnings == ("not compiled yet, or run outside of compiled code: 0.up",)
    assert Report.from_json(stages[0].to_json()) == stages[0]
    assert "not compiled yet" in str(stages[0])
    merged = Report.merged([stages[1], stages[0], stages[1]])
    assert [(g.name, g.kernel) for g in merged.gemms] == [(f"{i}.up", "mm") for i in (1, 1, 1, 0, 0, 0)]
    assert merged.summary.warnings == (
        "compiled in some of the merged reports; in others not compiled yet, or run outside of compiled code:"
        " 0-1.up",
    )
    assert Report.merged([merged, merged]) == merged
    assert sum(g.kernel == "not compiled yet" for g in Report.merged(stages[:1]).gemms) == 3


def test_warnings_of_a_rank_that_adds_no_layer_stay():
    first, other = (report(*training("a"), warnings=words) for words in (("both",), ("both", "uneven")))
    merged = Report.merged([first, other])
    assert merged.summary.warnings == ("both", "uneven")
    assert (merged.gemms, merged.summary.graphs) == (first.gemms, 1)


def test_reports_of_different_things_are_not_merged():
    first = report(*training("a"))
    other = Report.from_parts([Part()], target="sm_100", policy="preset nvidia")
    with pytest.raises(OptionError, match="have one target, found 'cpu', 'sm_100'"):
        Report.merged([first, other])
    with pytest.raises(OptionError, match="nothing to merge"):
        Report.merged([])


def test_merge_command_writes_or_prints_one_report(tmp_path: Path, capsys):
    paths = [tmp_path / f"mx_{i}.json" for i in range(2)]
    for i, path in enumerate(paths):
        report(*training(f"layers.{i}.up")).save(path)
    assert main(["merge", *map(str, paths), "-o", str(tmp_path / "mx.json")]) == 0
    assert capsys.readouterr().out == f"2 reports, 2 layers; written to {tmp_path / 'mx.json'}\n"
    assert len(json.loads((tmp_path / "mx.json").read_text())["gemms"]) == 6
    assert main(["merge", *map(str, paths)]) == 0
    assert "layers.0-1.up" in capsys.readouterr().out
    assert main(["merge", str(paths[0]), str(tmp_path / "no.json")]) == 2


class Broken(Made, a=(64, 64), b=(64, 64), both=(64, 64)):
    """A graph break in the middle, and a layer that both graphs use."""

    def forward(self, x):
        y = self.both(self.a(x))
        torch._dynamo.graph_break()
        return self.both(self.b(y))


def counts(report: Report) -> dict[str, int]:
    names = [g.name for g in report.gemms if g.gemm == "fprop"]
    return {name: names.count(name) for name in names}


def test_the_frames_of_a_model_are_one_report():
    torch.compile(Broken(), backend=EagerBackend())(torch.randn(4, 64)).sum().backward()
    (merged,) = mxcompile.reports()
    assert counts(merged) == {"a": 1, "both": 2, "b": 1}
    assert merged.summary.graphs == len(merged.graph) == 2
    assert merged.summary.graph_breaks == 1


def test_a_graph_compiled_again_is_counted_once():
    compiled = torch.compile(Broken(), backend=EagerBackend(), dynamic=False)
    for rows in (4, 5, 6):
        compiled(torch.randn(rows, 64)).sum().backward()
    (merged,) = mxcompile.reports()
    assert counts(merged) == {"a": 1, "both": 2, "b": 1}
    assert {g.m for g in merged.gemms if g.gemm == "fprop"} == {6}
    assert merged.summary.graphs == 2


def test_one_row_stands_beside_many_and_another_precision_beside_the_first():
    """Decode and prefill are graphs of their own, and both run."""
    backend = EagerBackend(policy=policy(rule("bf16", max_m=4), rule(name="*")))
    compiled = torch.compile(Broken(), backend=backend, dynamic=False)
    with torch.no_grad():
        for rows in (8, 9, 3, 1):
            compiled(torch.randn(rows, 64))
    (merged,) = mxcompile.reports()
    rows = [(g.m, g.precision) for g in merged.gemms if g.name == "a"]
    assert rows == [(9, "mxfp8"), (3, "bf16"), (1, "bf16")]


def test_models_and_policies_have_reports_of_their_own():
    models = [nn.Sequential(nn.Linear(64, 64)), nn.Sequential(nn.Linear(64, 64))]
    for model in models:
        torch.compile(model, backend=EagerBackend())(torch.randn(4, 64))
    torch._dynamo.reset()
    torch.compile(models[0], backend=EagerBackend(policy="bf16"))(torch.randn(4, 64))
    assert [r.summary.policy for r in mxcompile.reports()] == ["preset nvidia"] * 2 + ["preset bf16"]


def test_models_that_share_a_file_are_told_apart(tmp_path: Path, caplog):
    """Both are an `nn.Sequential`, one code: the second took the place of the first without a word."""
    path = tmp_path / "mx.json"
    generator = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 128))
    critic = nn.Sequential(nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 192), nn.ReLU(), nn.Linear(192, 32))
    first, second = (torch.compile(m, backend=EagerBackend(report=path)) for m in (generator, critic))
    with caplog.at_level(logging.WARNING, "mxcompile.report"):
        second(first(torch.randn(32, 64))).sum().backward()
    alone, last = mxcompile.reports()
    saved, (warning,) = Report.load(path), Report.load(path).summary.warnings
    assert saved == dataclasses.replace(last, summary=dataclasses.replace(last.summary, warnings=(warning,)))
    assert saved.summary.weight_bytes > alone.summary.weight_bytes > 0
    assert repr(str(path)) in warning
    assert "give each model a path of its own" in warning
    assert [r.message for r in caplog.records if r.name == "mxcompile.report"] == [warning]


def test_models_with_other_names_are_one_report_in_a_file(tmp_path: Path):
    """As blocks that are compiled one by one, and code without a known model."""
    registry, models = Registry(), [nn.Linear(1, 1), None, nn.Linear(1, 1)]
    for index, model in enumerate(models):
        fresh = Ledger(target="cpu", policy="p", model=model, path=tmp_path / "mx.json")
        gemms = record(f"{index}.up"), record("1.up" if model is None else "")
        registry.put(registry.open(index, fresh), None, Part(gemms=gemms))
    saved = Report.load(tmp_path / "mx.json")
    assert [gemm.name for gemm in saved.gemms] == ["0.up", "", "1.up", "1.up", "2.up", ""]
    assert saved.summary.warnings == ()


def test_the_plan_of_a_model_is_in_its_report():
    registry, model = Registry(), nn.Linear(1, 1)
    ledger = registry.open("frame", Ledger(target="cpu", policy="p", group="g", model=model))
    registry.plan(model, "g", [record("0"), record("1")])
    registry.put(ledger, None, Part(gemms=(record("1", kernel="mm"),)))
    (planned,) = registry.reports()
    assert [(g.name, g.kernel) for g in planned.gemms] == [("0", "not compiled yet"), ("1", "mm")]


def test_a_report_that_takes_long_to_write_is_written_once_a_call(tmp_path: Path, monkeypatch):
    now, writes = [0.0], []

    def save(report, path):
        writes.append(len(report.gemms))
        now[0] += 1.0

    monkeypatch.setattr("mxcompile.report.registry.time.monotonic", lambda: now[0])
    monkeypatch.setattr(Report, "save", save)
    registry = Registry()
    ledger = registry.open(object(), Ledger(target="cpu", policy="p", path=tmp_path / "mx.html"))
    for number in range(50):
        registry.put(ledger, None, Part(gemms=(*training(f"layers.{number}.up"),)))
        now[0] += 0.01
    assert len(writes) == 1
    registry.flush()
    assert writes == [writes[0], 50 * writes[0]], "the last write has all graphs"
    registry.flush()
    assert len(writes) == 2, "nothing has changed since"


def test_a_slow_report_file_is_complete_after_a_call_and_after_a_backward(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("mxcompile.report.registry._SLOW_S", -1.0)
    monkeypatch.setattr("mxcompile.report.registry._PAUSE", 1e12)
    path = tmp_path / "mx.json"
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    compiled = torch.compile(model, backend="mxfp8", options={"report": path, "policy": "ocp"})
    loss = compiled(torch.randn(4, 64)).sum()
    assert Report.load(path) == mxcompile.reports()[-1]
    loss.backward()
    report = Report.load(path)
    assert report == mxcompile.reports()[-1]
    assert {gemm.gemm for gemm in report.gemms if gemm.kernel} == {"fprop", "dgrad", "wgrad"}


def test_gather_reports_without_ranks_returns_local_reports():
    step()
    assert mxcompile.gather_reports() == mxcompile.reports()


def _stage(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mxcompile.clear_reports()
    ledger = REGISTRY.open(object(), Ledger(target="cpu", policy="p", path=folder / "mx_{rank}.json"))
    REGISTRY.put(ledger, None, Part(gemms=(*training(f"layers.{rank}.up"),)))
    (gathered,) = mxcompile.gather_reports()
    gathered.save(folder / f"merged_{rank}.json")
    dist.destroy_process_group()


def test_two_ranks_gather_one_report(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_stage, args=(rank, tmp_path)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
        assert rank.exitcode == 0
    of_ranks = [Report.load(tmp_path / f"mx_{rank}.json") for rank in range(2)]
    first, second = (Report.load(tmp_path / f"merged_{rank}.json") for rank in range(2))
    assert first == second == Report.merged(of_ranks)
    assert [g.name for g in first.gemms] == ["layers.0.up"] * 3 + ["layers.1.up"] * 3
