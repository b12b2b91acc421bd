"""Rules that write operands: what is in the file, how large it is, and who reads it."""

from __future__ import annotations

import errno
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.reports import EVERYTHING
from torch import Tensor, nn
from watched_models import batch

from mxcompile import ops
from mxcompile.cli.main import main
from mxcompile.errors import OptionError
from mxcompile.watch import Dump, Watch, read
from mxcompile.watch import dump as dumps


def test_rows_of_the_largest_magnitudes():
    x = torch.arange(24.0).reshape(6, 4)
    x[1, 2], x[3, 0] = math.nan, -math.inf
    values, rows = ops.excerpt(x, -1, 12)
    assert rows.tolist() == [1, 3, 5]
    torch.testing.assert_close(values, x[[1, 3, 5]], rtol=0, atol=0, equal_nan=True)
    values, rows = ops.excerpt(x[4:], 0, 4)
    assert rows.tolist() == [2, 3]
    assert values.tolist() == [[18.0, 22.0], [19.0, 23.0]]


def test_long_rows_are_cut():
    values, rows = ops.excerpt(torch.ones(3, 100), -1, 30)
    assert values.shape == (1, 30)
    assert rows.shape == (1,)


@pytest.mark.parametrize(("sizes", "dim"), [((4, 6), -1), ((2, 3, 5), 1), ((0, 4), -1), ((7,), 0)])
def test_the_operator_keeps_its_word(sizes: tuple[int, ...], dim: int):
    torch.library.opcheck(ops.excerpt, (torch.randn(sizes), dim, 8))


def run(path: Any, steps: int = 2, **options: Any) -> tuple[nn.Module, list[Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, results = nn.Sequential(nn.Linear(40, 72), nn.GELU(), nn.Linear(72, 40)), []
    watch = Watch(path, every=1, **options)
    compiled = torch.compile(model, backend=EagerBackend(root=model, watch=watch, policy=EVERYTHING))
    for step in range(steps):
        result = compiled(batch(step).requires_grad_())
        result.sum().backward()
        results += [result.detach(), model[0].weight.grad.clone()]
        watch.step()
    watch.close()
    return model, results


def test_operands_of_the_product_are_in_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "run.jsonl"
    rule = {"when": {"amax": "> 0"}, "layer": "0", "gemm": "fprop", "operand": "x", "do": "dump"}
    with caplog.at_level(logging.WARNING, "mxcompile.watch"):
        model, results = run(path, rules=[rule])
    _, without = run(tmp_path / "other.jsonl")
    assert all(map(torch.equal, results, without))
    (record,) = (record for record in read(path) if record["kind"] == "rule")
    file = tmp_path / "run.dump" / "step-0-0-fprop.pt"
    assert record["dump"] == str(file)
    dump = Dump.load(file)
    assert (dump.step, dump.layer, dump.gemm) == (0, "0", "fprop")
    assert {*dump.operands} == {"x", "w"}
    values, rows, facts = dump.operands["x"]
    assert rows.tolist() == [*range(24)]
    assert torch.equal(values, batch(0))
    assert facts == {"format": "e4m3 1x32 rceil", "dim": -1, "sizes": [24, 40]}
    assert torch.equal(dump.operands["w"][0], model[0].weight)
    (sample, *_) = (record for record in read(path) if record["kind"] == "sample")
    (row,) = (
        row for row in sample["rows"] if (row["layer"], row["gemm"], row["operand"]) == ("0", "fprop", "x")
    )
    assert {name: row[name] for name in ("amax", "sqnr", "underflow")} == {
        name: dump.statistics()["x"][name] for name in ("amax", "sqnr", "underflow")
    }


def test_files_are_small_and_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dumps, "FILES", 2)
    rule = {"when": {"amax": "> 0"}, "operand": "w", "do": "dump"}
    run(tmp_path / "run.jsonl", rules=[rule], dump=tmp_path / "here")
    reports = [record["dump"] for record in read(tmp_path / "run.jsonl") if record["kind"] == "rule"]
    assert reports[2:] == ["a run writes at most 2 files"] * 2
    assert len([*(tmp_path / "here").iterdir()]) == 2


def test_a_folder_that_cannot_be_written_ends_no_run(caplog: pytest.LogCaptureFixture):
    records: list[dict[str, Any]] = []
    rule = {"when": {"amax": "> 0"}, "operand": "w", "do": "dump"}
    with caplog.at_level(logging.WARNING, "mxcompile.watch"):
        run(records.append, rules=[rule], dump="/proc/nowhere")
    assert "cannot write operands to /proc/nowhere" in caplog.text
    assert sum(record["kind"] == "sample" for record in records) == 2


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def torn(path: Path, content: bytes) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    rule = {"when": {"amax": "> 0"}, "layer": "2", "gemm": "dgrad", "operand": "dy", "do": "dump"}
    monkeypatch.setattr(Path, "write_bytes", torn)
    run(tmp_path / "run.jsonl", rules=[rule])
    assert [*(tmp_path / "run.dump").iterdir()] == []
    (record,) = (record for record in read(tmp_path / "run.jsonl") if record["kind"] == "rule")
    assert record["dump"] == "no file"


def test_the_command_shows_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rule = {"when": {"amax": "> 0"}, "layer": "2", "gemm": "dgrad", "operand": "dy", "do": "dump"}
    run(tmp_path / "run.jsonl", rules=[rule])
    assert main(["watch", str(tmp_path / "run.dump" / "step-0-2-dgrad.pt")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("step 0: dy of 2 dgrad: amax > 0 (")
    assert {line.partition(":")[0] for line in shown[1:]} == {"dy", "w"}


def test_other_files_are_refused(tmp_path: Path):
    path = tmp_path / "x.pt"
    torch.save({"about": "{}"}, path)
    with pytest.raises(OptionError, match="is not a file of operands"):
        Dump.load(path)
