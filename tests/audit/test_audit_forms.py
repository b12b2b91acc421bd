"""An audit as text, Markdown, JSON, HTML and pictures, and on the command line."""

from __future__ import annotations

import html
import json
import struct
from pathlib import Path

import models
import pytest
import torch
from torch import nn

import mxcompile
from mxcompile.audit import Audit, audit
from mxcompile.audit.text import to_text
from mxcompile.cli import main
from mxcompile.errors import OptionError
from mxcompile.report import GemmNumerics, Numerics


@pytest.fixture(scope="module")
def result() -> Audit:
    torch.manual_seed(0)
    case = models.llama(2)
    return audit(case.model, **case.kwargs)


def test_text_is_worst_first_and_fits(result: Audit) -> None:
    text = str(result)
    assert max(map(len, text.splitlines())) <= 120
    first, second, third = text.splitlines()[:3]
    assert first == "MXFP8 audit, policy preset nvidia: 42 GEMMs, 72 cast tensors"
    numerics = result.numerics
    assert second == (
        f"loss {numerics.loss:.6g}, in BF16 {numerics.loss_reference:.6g}: gap {numerics.loss_gap:+.4%}"
    )
    assert third.startswith(f"main output against BF16: SQNR {numerics.logits_sqnr_db:.2f} dB, cosine 0.99")
    rows = [line.split() for line in text.splitlines() if line.startswith("model.layers.")]
    decibels = [float(row[4]) for row in rows[:20]]
    assert decibels == sorted(decibels)
    assert decibels[0] == round(numerics.worst_gemms()[0].sqnr_db, 2)
    assert "… and 22 better ones" in text
    assert "… and 52 better ones" in text


def test_files_hold_everything(result: Audit, tmp_path: Path) -> None:
    for suffix in (".txt", ".md", ".json", ".html"):
        result.save(tmp_path / "new" / f"audit{suffix}")
    text, markdown, page = ((tmp_path / "new" / f"audit{s}").read_text() for s in (".txt", ".md", ".html"))
    assert max(map(len, text.splitlines())) <= 120
    assert "better ones" not in text
    assert "MXFP8 report: " in text
    assert sum(line.startswith("| model.layers.") for line in markdown.splitlines()) == 42 + 72
    back = Audit.from_json((tmp_path / "new" / "audit.json").read_text())
    assert back == result
    for gemm in result.numerics.gemms:
        assert html.escape(gemm.name) in page
    with pytest.raises(OptionError, match=r"unknown suffix '\.pdf'.*allowed: \.txt, \.md, \.json, \.html"):
        result.save(tmp_path / "audit.pdf")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not an mxcompile audit"),
        ("[]", "expected the keys schema, report, numerics"),
        ('{"schema": 2, "report": {}, "numerics": {}}', "not an mxcompile audit of schema 1"),
        ('{"schema": 1, "numerics": {}}', "expected the keys"),
    ],
)
def test_other_json_is_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Audit.from_json(text)


def test_values_that_are_no_numbers_are_said_by_name() -> None:
    gemm = GemmNumerics(
        name="a" * 200, role="qkv", gemm="fprop", m=1, n=2, k=3, batch=4, calls=5,
        sqnr_db=float("nan"), cosine=float("nan"), mse=float("nan"), rel_error=float("nan"),
    )  # fmt: skip
    exact = GemmNumerics(
        name="b", role="qkv", gemm="dgrad", m=1, n=2, k=3,
        sqnr_db=float("inf"), cosine=1.0, mse=0.0, rel_error=0.0,
    )  # fmt: skip
    text = to_text(Numerics(gemms=(exact, gemm), policy="p", notes=("a long note " * 20,)))
    assert max(map(len, text.splitlines())) <= 120
    rows = text.splitlines()[-2:]
    assert rows[0].split()[-5:] == ["4·1×2×3", "NaN", "nan", "nan", "nan%"]
    assert "(5 calls)" in rows[0]
    assert rows[1].split()[-4:] == ["exact", "1.00000", "0.0e+00", "0"]


def test_pictures(result: Audit, tmp_path: Path) -> None:
    written = result.plot(tmp_path / "plots")
    assert [path.name for path in written] == ["gemms.png", "tensors.png", "scales.png"]
    for path in written:
        header = path.read_bytes()[:24]
        assert header.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", header[16:])
        assert width > 500
        assert height > 300


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(torch.relu(self.up(x)))).square().mean()


def made() -> tuple[nn.Module, tuple[torch.Tensor], dict[str, object]]:
    return TwoLayers(), (torch.randn(40, 64),), {}


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "audit.json"
    model = f"{__name__}:made"
    assert main(["audit", model, "-o", str(out), "--plots", str(tmp_path), "--policy", "ocp"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("MXFP8 audit, policy preset ocp: 5 GEMMs, 10 cast tensors")
    assert {g.name for g in Audit.from_json(out.read_text()).numerics.gemms} == {"up", "down"}
    assert (tmp_path / "scales.png").is_file()
    assert main(["audit", model, "--inference"]) == 0
    assert "2 GEMMs, 4 cast tensors, forward only" in capsys.readouterr().out
    assert main(["audit", model, "-o", "audit.doc"]) == 2
    assert "unknown suffix '.doc'" in capsys.readouterr().err


def test_a_config_gets_random_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["audit", str(tmp_path), "--length", "40"]) == 0
    printed = capsys.readouterr().out
    assert "21 GEMMs" in printed
    assert "NaN" not in printed


def test_public_names() -> None:
    assert mxcompile.audit is audit
    assert mxcompile.Audit is Audit
