"""An audit as text, Markdown, JSON, HTML and pictures, and on the command line."""

from __future__ import annotations

import html
import json
import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import models
from helpers.made import Made
from matplotlib.figure import Figure
from recorded_bars import recorded_bars
from torch import nn

from mxcompile.analysis.audit import Audit, audit
from mxcompile.analysis.audit.plot import grid, plot
from mxcompile.analysis.audit.text import to_text
from mxcompile.analysis.study.session import Outcome, Session
from mxcompile.cli import main
from mxcompile.errors import OptionError
from mxcompile.report import GemmNumerics, Numerics, TensorNumerics


@pytest.fixture(scope="module")
def result() -> Audit:
    torch.manual_seed(0)
    case = models.llama(2)
    return audit(case.model, **case.kwargs)


def test_text_is_worst_first_and_fits(result: Audit) -> None:
    text = str(result)
    assert max(map(len, text.splitlines())) <= 120
    first, second, third, fourth = text.splitlines()[:4]
    assert first == "MXFP8 audit, policy preset nvidia: 42 GEMMs, 72 cast tensors"
    numerics = result.numerics
    assert second == (
        f"loss {numerics.loss:.6g}, in FP32 {numerics.loss_reference:.6g}: gap {numerics.loss_gap:+.4%}"
    )
    assert third.startswith(f"main output against FP32: SQNR {numerics.logits_sqnr_db:.2f} dB, cosine 0.99")
    assert fourth == (
        f"parameter gradients against FP32, weighted by FLOPs: relative error {numerics.gradient_error:.3%},"
        f" cosine {numerics.gradient_cosine:.6f}"
    )
    rows = [line.split() for line in text.splitlines() if line.startswith("model.layers.")][:20]
    shown = {forward: [row for row in rows if (row[2] == "fprop") == forward] for forward in (True, False)}
    by_output = [float(row[8].rstrip("%")) for row in shown[True]]
    assert by_output == sorted(by_output, reverse=True)
    harm = [math.prod(map(int, row[3].split("×"))) * float(row[7].rstrip("%")) ** 2 for row in shown[False]]
    assert harm == sorted(harm, reverse=True)
    assert "… and 22 with less harm" in text
    assert "… and 52 with less harm" in text


def test_gradients_of_parameters_are_those_of_training(result: Audit) -> None:
    """Held to eager autograd: the unquantized gradients, and those quantization moved."""
    torch.manual_seed(0)
    case = models.llama(2)
    case.model(**case.kwargs).loss.backward()
    expected = {name: p.grad for name, p in case.model.named_parameters() if p.grad is not None}
    measured = {parameter.name: parameter for parameter in result.numerics.parameters}
    assert set(measured) == set(expected)
    for name, parameter in measured.items():
        assert parameter.numel == expected[name].numel()
        assert 0.5 < parameter.cosine < 1.00001
        # Σ error² / numel over rel_error² is the mean square of the reference
        mean_square = float(expected[name].double().square().mean())
        assert parameter.mse / parameter.rel_error**2 == pytest.approx(mean_square, rel=0.05)
    weights = [parameter for parameter in measured.values() if parameter.flops]
    assert {parameter.role for parameter in weights} >= {"qkv", "attn_out", "ffn_in", "ffn_out", "head"}
    assert not any("norm" in parameter.name for parameter in weights)


def test_view_groups_rows_by_role_block_or_underflow(result: Audit) -> None:
    roles = result.view("role").splitlines()
    assert {"qkv", "attn_out", "ffn_in", "ffn_out"} == {line.split()[0] for line in roles[-4:]}
    blocks = result.view("block").splitlines()
    assert [line.split()[0] for line in blocks[-2:]] == ["model.layers.0", "model.layers.1"]
    losing = result.view("underflow").splitlines()
    worst = max(result.numerics.tensors, key=lambda tensor: tensor.underflow)
    assert next(line for line in losing if line.startswith("model.layers.")).startswith(worst.name)
    assert max(map(len, (*roles, *blocks, *losing))) <= 120
    with pytest.raises(OptionError, match=r"unknown view 'rule' \(did you mean 'role'\?\)"):
        result.view("rule")


def test_the_bar_is_there_before_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    bars = recorded_bars(monkeypatch, "mxcompile.analysis.audit.measure")

    seen: list[int] = []
    run = Session.run

    def watched(session: Session, *args: Any, **kwargs: Any) -> Outcome:
        seen.append(len(bars))
        return run(session, *args, **kwargs)

    monkeypatch.setattr(Session, "run", watched)
    audited = audit(TwoLayers(), torch.randn(40, 64))
    (bar,) = bars
    assert seen == [1, 1]
    assert bar.n == bar.total == 2 * len(audited.numerics.gemms)
    words = ["audit: tracing", "audit: unquantized: ", "audit: quantized, measured: "]
    assert list(dict.fromkeys(bar.descriptions)) == words


def test_other_precisions_are_called_by_their_names(tmp_path: Path) -> None:
    audited = audit(TwoLayers(), torch.randn(40, 64), policy="fp8_rowwise")
    audited.save(tmp_path / "audit.html")
    page = (tmp_path / "audit.html").read_text()
    assert str(audited).startswith("FP8 audit, policy preset fp8_rowwise: ")
    assert "Output of each FP8 GEMM against FP32" in page
    assert "MXFP8" not in str(audited)
    assert "MXFP8" not in page


def test_saved_audit_has_all_layers_in_every_form(result: Audit, tmp_path: Path) -> None:
    for suffix in (".txt", ".md", ".json", ".html"):
        result.save(tmp_path / "new" / f"audit{suffix}")
    text, markdown, page = ((tmp_path / "new" / f"audit{s}").read_text() for s in (".txt", ".md", ".html"))
    assert max(map(len, text.splitlines())) <= 120
    assert "less harm" not in text
    assert "MXFP8 report: " in text
    parameters = sum(parameter.name.startswith("model.layers.") for parameter in result.numerics.parameters)
    rows = [line.replace("\\", "") for line in markdown.splitlines()]
    assert sum(line.startswith("| model.layers.") for line in rows) == 42 + 72 + parameters
    assert Audit.from_json((tmp_path / "new" / "audit.json").read_text()) == result
    for gemm in result.numerics.gemms:
        assert html.escape(gemm.name) in page
    with pytest.raises(OptionError, match=r"unknown suffix '\.pdf'.*allowed: \.txt, \.md, \.json, \.html"):
        result.save(tmp_path / "audit.pdf")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not an mxcompile audit: no key 'schema'"),
        ('{"schema": 2, "report": {}, "numerics": {}}', "2 is not 1, which this mxcompile reads; a newer"),
        ('{"schema": 1, "numerics": {}}', "key 'report' is missing"),
        (
            '{"schema": 1, "gemms": [], "summary": {}}',
            "this is an mxcompile report, where an mxcompile audit",
        ),
    ],
)
def test_other_json_is_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Audit.from_json(text)


def test_nan_and_inf_are_written_by_name() -> None:
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
    first, *rest, last = text.partition("\n-----")[2].splitlines()[1:]
    assert first.split()[-5:] == ["4·1×2×3", "NaN", "nan", "nan", "nan%"]
    assert "(5 calls)" in " ".join(rest)
    assert last.split()[-4:] == ["exact", "1.00000", "0.0e+00", "0"]


def test_plot_writes_three_png_files(result: Audit, tmp_path: Path) -> None:
    written = result.plot(tmp_path / "plots")
    assert [path.name for path in written] == ["gemms.png", "tensors.png", "scales.png"]
    for path in written:
        header = path.read_bytes()[:24]
        assert header.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", header[16:])
        assert width > 500
        assert height > 300


def test_pictures_note_layers_and_casts_that_are_not_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cast = TensorNumerics(
        name="a", role="qkv", operand="x", layout="rowwise", gemms=("fprop",), elem="e4m3", rounding="rceil",
        numel=64, amax=1.0, sqnr_db=30.0, cosine=1.0, mse=0.0, rel_error=0.1, underflow=0.0, saturation=0.0,
        scale_histogram=((0, 3), (120, 5)),
    )  # fmt: skip
    gemm = GemmNumerics(
        name="a", role="qkv", gemm="fprop", m=1, n=2, k=3, sqnr_db=30.0, cosine=1.0, mse=0.0, rel_error=0.1
    )
    casts = [replace(cast, name=f"layers.{i}") for i in range(62)]
    gemms = [replace(gemm, name=f"layer_{i}") for i in range(62)]
    casts[5], gemms[5] = replace(casts[5], sqnr_db=math.nan), replace(gemms[5], sqnr_db=math.inf)
    notes: dict[str, str] = {}
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, path: notes.update({path.name: figure.get_supxlabel()})
    )
    plot(Numerics(tensors=tuple(casts), gemms=tuple(gemms)), tmp_path)
    assert notes == {
        "gemms.png": "not drawn: 1 without any error; names of 31 of 62 layers",
        "tensors.png": "not drawn: 1 with NaN; 2 of 62 casts, with less harm",
        "scales.png": "not drawn: 180 blocks of zeros or NaN; 2 of 62 casts, with less harm",
    }
    notes.clear()
    plot(Numerics(gemms=(gemm,)), tmp_path)
    assert notes == {"gemms.png": ""}


def test_gemms_of_blocks_are_drawn_by_depth(
    result: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, _: figures.append(figure))
    numerics = result.numerics
    wrong = [gemm if i else replace(gemm, sqnr_db=math.nan) for i, gemm in enumerate(numerics.gemms)]
    plot(replace(numerics, gemms=tuple(wrong), tensors=()), tmp_path)
    (figure,) = figures
    axes, bar = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["model.layers.0", "model.layers.1"]
    kinds = [label.get_text() for label in axes.get_xticklabels()]
    assert (kinds[:2], len(kinds)) == (["self_attn.q_proj fprop", "self_attn.k_proj fprop"], 21)
    assert kinds[-1].endswith(" wgrad")
    image = axes.get_images()[0].get_array()
    for gemm in wrong:
        block, _, kind = gemm.name.removeprefix("model.layers.").partition(".")
        cell = image[int(block), kinds.index(f"{kind} {gemm.gemm}")]
        assert bool(cell.mask) if math.isnan(gemm.sqnr_db) else float(cell) == pytest.approx(gemm.sqnr_db)
    assert "dB" in bar.get_ylabel()
    assert figure.get_supxlabel() == "not drawn: 1 with NaN"


def test_experts_of_a_block_share_a_column_and_layers_outside_blocks_have_rows(result: Audit) -> None:
    gemm = result.numerics.gemms[0]
    names = ("proj", "layers.0.experts.0.up", "layers.0.experts.1.up", "layers.1.experts.0.up")
    measured = [replace(gemm, name=name, gemm="fprop", sqnr_db=30.0 + i) for i, name in enumerate(names)]
    by_depth = grid(measured)
    assert by_depth is not None
    assert by_depth.rows == ("proj", "layers.0", "layers.1")
    assert by_depth.columns == ("fprop", "experts.*.up fprop")
    assert by_depth.cells == {(0, 0): 30.0, (1, 1): 31.0, (2, 1): 33.0}
    broken = grid([*measured, replace(measured[2], sqnr_db=math.nan)])
    assert broken is not None
    assert math.isnan(broken.cells[1, 1])
    assert grid(measured[:3]) is None  # one block alone


class TwoLayers(Made, up=(64, 96), down=(96, 64)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(torch.relu(self.up(x)))).square().mean()


def example() -> tuple[nn.Module, tuple[torch.Tensor], dict[str, object]]:
    return TwoLayers(), (torch.randn(40, 64),), {}


def test_audit_command_writes_file_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "audit.json"
    model = f"{__name__}:example"
    assert main(["audit", model, "-o", str(out), "--plots", str(tmp_path), "--policy", "ocp"]) == 0
    assert capsys.readouterr().out.startswith("MXFP8 audit, policy preset ocp: 5 GEMMs, 10 cast tensors")
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
    out = tmp_path / "out.json"
    assert main(["audit", str(tmp_path), "--length", "40", "-o", str(out)]) == 0
    printed = capsys.readouterr()
    assert "21 GEMMs" in printed.out
    assert "NaN" not in printed.out
    assert printed.err.startswith("random weights and inputs: ")
    (note,) = Audit.load(out).numerics.notes  # whoever opens the file is told too
    assert note.startswith("random weights and inputs: the loss and its gap mean little for ")
    assert str(tmp_path) in note
    assert note.endswith("that returns real weights and inputs")
    assert "note: random weights and inputs: " in printed.out
    policy = tmp_path / "policy.yaml"
    assert main(["tune", str(tmp_path), "--length", "40", "--min-sqnr", "1", "-o", str(policy)]) == 0
    assert "# note: random weights and inputs: " in policy.read_text()
    capsys.readouterr()
    assert main(["audit", str(tmp_path), "--length", "40", "--compare", "ocp"]) == 0
    assert "note: random weights and inputs: " in capsys.readouterr().out


def test_a_checkpoint_is_audited_with_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They were random ones. Of a head of zeros the loss is that of equal logits."""
    model = models.llama(1).model
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(tmp_path)
    assert main(["audit", str(tmp_path), "--length", "8"]) == 0
    printed = capsys.readouterr()
    assert f"loss {math.log(model.config.vocab_size):.6g}, " in printed.out
    assert "\nrandom inputs: " in printed.err


@pytest.mark.parametrize("with_loss", [True, False])
def test_the_bar_ends_at_its_end(with_loss: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a loss only the run of noise has a backward."""
    bars = recorded_bars(monkeypatch, "mxcompile.analysis.audit.measure")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    policy = {"version": 1, "rules": [{"match": {"name": "*"}, "use": "mxfp8"}]}
    loss = (lambda output: output.square().mean()) if with_loss else None
    audit(model, torch.randn(32, 64), policy=policy, loss_fn=loss)
    (bar,) = bars
    assert bar.n == bar.total == (3 * 5 if with_loss else 2 * 2 + 5)


def test_at_a_prompt_an_audit_is_one_line() -> None:
    audited = audit(torch.nn.Linear(64, 64), torch.randn(32, 64))
    assert repr([audited]) == f"[<{str(audited).splitlines()[0]}>]"
    assert audited._repr_html_().startswith("<iframe srcdoc=")
