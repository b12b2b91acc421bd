"""What `explain` says of tokens, arithmetic and memory, and of chips that would be slower; `--sweep`."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import mxcompile
from mxcompile.analysis.explain.sweep import at_tokens, sweep
from mxcompile.cli import main
from mxcompile.errors import OptionError
from mxcompile.report.forms.words import tokens_of


class Block(nn.Module):
    """An attention and an FFN with a skip around each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def explained(
    width: int, batch: int, *, target: str = "sm_100", training: bool = True, policy: str = "nvidia"
) -> mxcompile.Report:
    with torch.device("meta"):
        model, x = Block(width).bfloat16(), torch.empty(batch, 128, width, dtype=torch.bfloat16)
    return mxcompile.explain(model, x, target=target, training=training, policy=policy)


def test_estimates_at_more_tokens_match_a_trace_of_a_larger_batch():
    """Held to a trace of the larger batch, GEMM by GEMM."""
    few, many = explained(256, 2), explained(256, 32)
    scaled = at_tokens(few, tokens_of(many.gemms))
    assert tokens_of(many.gemms) == 32 * 128
    for ours, traced in zip(scaled.gemms, many.gemms, strict=True):
        assert (ours.name, ours.gemm, ours.flops) == (traced.name, traced.gemm, traced.flops)
        assert ours.estimate_us == pytest.approx(traced.estimate_us)
        assert ours.estimate_bf16_us == pytest.approx(traced.estimate_bf16_us)


def test_summary_of_flops_and_memory_matches_counts_by_hand():
    """Counted by hand: 12 width² weights, six FLOPs for each and every token."""
    width, batch = 256, 2
    report = explained(width, batch)
    tokens, weights = batch * 128, 12 * width**2
    linear = sum(gemm.flops for gemm in report.gemms if gemm.role not in ("attn_scores", "attn_values"))
    total = sum(gemm.flops for gemm in report.gemms)
    assert linear == 6 * weights * tokens
    assert f", {total / 1e9:.3g} GFLOP, {tokens} tokens, target sm_100" in " ".join(str(report).split())
    summary = report.summary
    assert summary.parameter_bytes == 2 * (weights + 2 * width)
    assert summary.gradient_bytes == summary.parameter_bytes
    assert summary.peak_bytes == 2 * summary.parameter_bytes + summary.saved_bytes
    assert re.search(
        r"peak memory: .* \(parameters .*, gradients .*, kept for backward .*, the optimizer", str(report)
    )
    inference = explained(width, batch, training=False).summary
    assert inference.gradient_bytes == 0
    assert inference.peak_bytes == summary.parameter_bytes + 2 * tokens * 5 * width


def advice(report: mxcompile.Report) -> str:
    return " ".join(warning for warning in report.summary.warnings if "is estimated slower with" in warning)


def test_advice_for_few_tokens_names_a_sufficient_number():
    report = explained(4096, 1)
    sentence = r"\((0\.\d+)×\): 128 tokens are few; with about ([\d,]+) \(a larger batch, .*\) it is as fast"
    match = re.search(sentence, advice(report))
    assert match is not None
    enough = int(match[2].replace(",", ""))
    faster, slower = (at_tokens(report, n).summary for n in (enough, enough // 2))
    assert faster.estimate_us <= faster.estimate_bf16_us
    assert slower.estimate_us > slower.estimate_bf16_us
    assert advice(explained(4096, enough // 128)) == ""


def test_narrow_layers_are_named():
    text = advice(explained(64, 1))
    assert "casts cost more than products gain, at any number of tokens; narrow layers" in text
    assert "up" in text


def test_advice_for_chip_without_the_format_names_another_policy():
    text = advice(explained(4096, 64, target="sm_90"))
    assert text.startswith("sm_90 is estimated slower with MXFP8 than in BF16 (0.")
    assert "the chip multiplies MXFP8 in BF16, and casts come on top (the policy fp8_rowwise, on" in text


def test_advice_for_format_without_kernel_names_products_in_bf16():
    text = advice(explained(4096, 64, policy="mxint8"))
    assert "the chip multiplies MXINT8 in BF16, and casts come on top" in text
    assert "narrow" not in text


def example():
    return Block(512).bfloat16(), (torch.empty(1, 128, 512, dtype=torch.bfloat16),), {}


def test_sweep_flag_prints_and_draws_token_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plot = tmp_path / "sweep.png"
    arguments = ["explain", f"{__name__}:example", "--target", "b200"]
    assert main([*arguments, "--sweep", "65536,128", "-o", str(plot)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if re.match(r"[\d,]+ ", line)]
    assert [row[0] for row in rows] == ["128", "65,536"]
    assert float(rows[0][-1].rstrip("×")) < float(rows[1][-1].rstrip("×"))
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert main([*arguments, "--sweep", "-o", str(tmp_path / "sweep.html")]) == 2
    assert "unknown suffix '.html'" in capsys.readouterr().err
    assert main(["explain", f"{__name__}:example", "--target", "cpu", "--sweep"]) == 2
    assert "target cpu has no data sheet to estimate from: name a chip as --target" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*arguments, "--sweep", "12,x"])


def test_sweep_notes_that_rules_by_tokens_are_fixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    policy = tmp_path / "policy.yaml"
    policy.write_text("version: 1\nrules:\n  - match: {role: ffn_in, min_m: 64}\n    use: mxfp8\n")
    assert main(f"explain {__name__}:example --target b200 --policy {policy} --sweep 128".split()) == 0
    assert "rules with min_m or max_m were matched at the tokens of the inputs" in capsys.readouterr().out


def test_sweep_without_linear_layers_raises():
    report = explained(256, 1)
    attention = tuple(gemm for gemm in report.gemms if gemm.role.startswith("attn_s"))
    with pytest.raises(OptionError, match="needs linear layers"):
        sweep(dataclasses.replace(report, gemms=attention))
