"""What files of samples say, in a terminal and as a page."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from mxcompile.cli.main import main
from mxcompile.errors import OptionError
from mxcompile.watch.summary import SampleFile
from mxcompile.watch.writers import SCHEMA, JsonLines

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "mxcompile/watch/page.html"


def row(layer: str, operand: str, error: float, **more: Any) -> dict[str, Any]:
    shares = {
        "underflow": 0.0,
        "saturated": 0.0,
        "error": error,
        "sqnr": 30.0,
        "nan": 0,
        "inf": 0,
        "changed": None,
    }
    return {"layer": layer, "gemm": "fprop", "operand": operand, **shares, **more}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three samples: one operand gets worse, another has a NaN in the last."""
    write = JsonLines(tmp_path / "run.jsonl")
    write({"schema": SCHEMA, "kind": "run", "policy": "preset nvidia"})
    for step in (0, 100, 200):
        rows = [
            row("a</script>", "x", 0.02),
            row("b", "x", 0.03 + step / 1000, underflow=step / 1000),
            row("c", "w", 0.01, nan=step // 200),
        ]
        write({"schema": SCHEMA, "kind": "sample", "step": step, "rows": rows})
    return write.path


def test_sample_file_finds_worst_and_moved_operands(file: Path):
    content = SampleFile.load(file)
    assert [key for key, _ in content.worst(2)] == [("c", "fprop", "w"), ("b", "fprop", "x")]
    ((key, before, now),) = content.moved(3, back=1)
    assert (key, before["underflow"], now["underflow"]) == (("b", "fprop", "x"), 0.1, 0.2)


def test_watch_command_prints_worst_and_moved_operands(file: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["watch", str(file), "--top", "1", "--back", "2"]) == 0
    text = capsys.readouterr().out
    assert "3 samples, steps 0 to 200, 3 operands, preset nvidia" in text
    assert re.search(r"worst at step 200 .*\nc fprop w .* 1\n", text)
    assert re.search(r"changed most since step 0 .*\nb fprop x .*0.00% → 20.00%", text)


def test_a_file_that_grows_is_read_from_where_it_ended(file: Path):
    content = SampleFile.load(file)
    assert not content.has_grown()
    text = file.read_text()
    file.write_text(text.replace("0.03", "9.03"))  # of the same length, and not read again
    with file.open("a") as cut:
        cut.write('{"schema": 1, "kind": "sam')
    assert not content.has_grown()
    file.write_text(file.read_text().rpartition("\n")[0] + "\n")
    JsonLines(file)({"schema": SCHEMA, "kind": "sample", "step": 50, "rows": [row("b", "x", 0.5)]})
    assert content.has_grown()
    assert [*content.samples] == [0, 50, 100, 200]
    assert content.samples[0]["b", "fprop", "x"]["error"] == 0.03
    assert not content.has_grown()


def test_following_a_file_that_is_rotated_away(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """It is gone for a while, and then another one has its place."""

    def away(_: float) -> None:
        file.unlink()
        monkeypatch.setattr(time, "sleep", back)

    def back(_: float) -> None:
        JsonLines(file)({"schema": SCHEMA, "kind": "sample", "step": 300, "rows": [row("b", "x", 0.5)]})
        monkeypatch.setattr(time, "sleep", stop)

    def stop(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", away)
    assert main(["watch", str(file), "--follow"]) == 130
    assert "1 samples, steps 300 to 300, 1 operands" in capsys.readouterr().out


def test_a_run_that_met_nan(file: Path, capsys: pytest.CaptureFixture[str]):
    finding = {"layer": "b", "gemm": "fprop", "operand": "x", "origin": "first in the model's input"}
    JsonLines(file)({"schema": SCHEMA, "kind": "nonfinite", "step": 250, **finding})
    assert main(["watch", str(file)]) == 1
    assert "step 250: NaN or Inf in x of b fprop, first in the model's input" in capsys.readouterr().out


def test_the_page_holds_all_numbers(file: Path, tmp_path: Path):
    page = tmp_path / "watch.html"
    assert main(["watch", str(file), "-o", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "://" not in text
    assert text.count("</script>") == 1
    (data,) = re.findall(r"^const data = (.*);$", text, re.MULTILINE)
    page_data = json.loads(data)
    assert page_data["steps"] == [0, 100, 200]
    index = page_data["operands"].index(["b", "fprop", "x"])
    assert page_data["numbers"]["underflow"][index] == [0.0, 0.1, 0.2]


def test_the_page_has_losses_where_they_were_noted(tmp_path: Path):
    write = JsonLines(tmp_path / "run.jsonl")
    for step, noted in ((0, {"loss": 2.5}), (10, {}), (20, {"loss": None})):
        write({"schema": SCHEMA, "kind": "sample", "step": step, **noted, "rows": [row("a", "x", 0.02)]})
    (data,) = re.findall(r"^const data = (.*);$", SampleFile.load(write.path).page(), re.MULTILINE)
    assert json.loads(data)["losses"] == [2.5, None, None]


def test_the_page_in_the_docs_is_of_this_template(tmp_path: Path):
    """`examples/recover.py` makes it: its data differ from run to run, the rest is the template."""
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs/recover.html", TEMPLATE)]
    shown, template = (re.sub(r"^const data = .*;$", "", page, flags=re.MULTILINE) for page in pages)
    assert shown == template


@pytest.mark.parametrize("text", ["", "{}\n", '{"schema": 1, "kind": "run"}\n'])
def test_file_without_samples_raises_on_load(text: str, tmp_path: Path):
    (tmp_path / "run.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(OptionError, match="the file has no sample"):
        SampleFile.load(tmp_path / "run.jsonl")


def test_watch_command_refuses_missing_file_and_suffix(file: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["watch", "nowhere.jsonl"]) == 2
    assert main(["watch", str(file), "-o", "page.pdf"]) == 2
    assert "unknown suffix '.pdf'" in capsys.readouterr().err
