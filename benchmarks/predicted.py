"""What a Llama-8B layer would take on each GPU by its machine code: bounds, predicted and not measured.

Forward and backward of 8,192 tokens, by policy beside BF16, each launch by `mxcompile.offline.bounds`; needs
no GPU.
Usage: python benchmarks/predicted.py [--targets sm_100 …] [--policies bf16 nvidia …] [--tokens 8192]
       python benchmarks/predicted.py --table --write        only the tables, into the pages that show them
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
from tabulate import tabulate
from torch import Tensor, nn

from mxcompile.lowering.targets import TARGETS
from mxcompile.offline import CodegenResult, Step, codegen

POLICIES = ["bf16", "nvidia"]
TOKENS = 8192

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- predicted: begin -->", "<!-- predicted: end -->"


class Layer(nn.Module):
    """A decoder layer of transformers, its rotary embedding given."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        config = LlamaConfig(
            hidden_size=4096,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            attn_implementation="sdpa",
        )
        self.layer = LlamaDecoderLayer(config, 0)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [1, tokens, width]; cos, sin: [1, tokens, 128]."""
        result: Tensor = self.layer(x, position_embeddings=(cos, sin))
        return result


def generated(target: str, policy: str, tokens: int) -> CodegenResult:
    """The layer's code for one target and policy."""
    with torch.device("meta"):
        layer = Layer().bfloat16()
        x = torch.empty(1, tokens, 4096, dtype=torch.bfloat16, requires_grad=True)
        cos, sin = (torch.empty(1, tokens, 128, dtype=torch.bfloat16) for _ in range(2))
    return codegen(layer, x, cos, sin, target=target, policy=policy)


def predict(target: str, policy: str, tokens: int) -> dict[str, Any]:
    """The row of one target and policy."""
    step = generated(target, policy, tokens).step
    return {"target": target, "policy": policy, "tokens": tokens, **row(step)}


def row(step: Step) -> dict[str, Any]:
    """A step's figures, rounded to what they are good for."""
    return {
        "us": round(step.us),
        "by_kind": {name: round(us) for name, us in sorted(step.by_kind.items())},
        "by_reason": {name: round(us) for name, us in sorted(step.by_reason.items())},
        "mb": round(step.num_bytes / 1e6),
        "cast_ratio": step.cast_ratio and round(step.cast_ratio, 2),
        "launches": step.launches,
        "unclear": step.unclear,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chips = [name for name, target in TARGETS.items() if target.peak is not None]
    parser.add_argument("--targets", nargs="*", choices=chips, default=chips)
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--table", action="store_true", help="only show what is in the results")
    parser.add_argument("--write", action="store_true", help="put the tables into the pages that show them")
    options = parser.parse_args()
    for target in [] if options.table else options.targets:
        for policy in options.policies:
            common.write("predicted", [predict(target, policy, options.tokens)])
    for page, made in PAGES.items() if options.write else ():
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        page.write_text(f"{before}{BEGIN}\n{made()}\n{END}{after}", encoding="utf-8")
    common.show(table(options.tokens))


def newest(tokens: int) -> dict[tuple[str, str], dict[str, Any]]:
    """The last figures of each target and policy, targets in the order of their table."""
    rows = {
        (row["target"], row["policy"]): row for row in common.read("predicted") if row["tokens"] == tokens
    }
    return dict(sorted(rows.items(), key=lambda item: list(TARGETS).index(item[0][0])))


def table(tokens: int = TOKENS) -> list[dict[str, str]]:
    """The newest figures of each target and policy, over those of BF16 on the same target."""
    rows = newest(tokens)
    shown = []
    for (target, policy), found in rows.items():
        if policy not in POLICIES:
            continue
        bf16 = rows.get((target, "bf16"), found)
        shown.append(
            {
                "chip": _chip(target),
                "policy": policy,
                "step, µs ≥": f"{found['us']:,}",
                "of BF16's": f"{found['us'] / bf16['us']:.2f}",
                **{f"{kind}s": f"{found['by_kind'].get(kind, 0):,}" for kind in ("product", "cast")},
                "MB": f"{found['mb']:,}",
                "casts ÷ memory": found["cast_ratio"] or "",
            }
        )
    return shown


def ratios(tokens: int = TOKENS) -> list[dict[str, str]]:
    """A row per chip: the step in MXFP8 over BF16's."""
    rows = newest(tokens)
    return [
        {
            "chip": _chip(target),
            "MX GEMM": "native" if TARGETS[target].native else "emulated",
            "MXFP8 step ÷ BF16's, predicted": f"{found['us'] / rows[target, 'bf16']['us']:.2f}",
        }
        for (target, policy), found in rows.items()
        if policy == "nvidia" and (target, "bf16") in rows
    ]


def _chip(target: str) -> str:
    peak = TARGETS[target].peak
    assert peak is not None
    return f"{peak.chip} ({target})"


def _markdown(rows: Callable[[], list[dict[str, str]]]) -> Callable[[], str]:
    return lambda: tabulate(rows(), headers="keys", tablefmt="github", disable_numparse=True)


PAGES = {
    ROOT / "README.md": _markdown(ratios),
    ROOT / "docs" / "codegen.md": _markdown(table),
}
"""Tables by the page that shows them."""


if __name__ == "__main__":
    main()
