"""Estimated time of a Llama-8B layer on each GPU, from its machine code: predicted and not measured.

A row per target and policy describes forward and backward of 8,192 tokens: the kernels of products, the least
bytes that casts and products move, and the work of each launch. The tables compute times from the work by the
rates in `mxcompile.offline.rates`. After a change of rates, ``--table --write`` suffices. Needs no GPU.
Usage: python benchmarks/predicted.py [--targets sm_100 …] [--policies bf16 nvidia …] [--tokens 8192]
       python benchmarks/predicted.py --table --write        only the tables, into the pages that show them
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
from tabulate import tabulate
from torch import Tensor, nn

from mxcompile import Watch
from mxcompile.formats import ScaleType
from mxcompile.lowering.targets import TARGETS
from mxcompile.offline import CodegenResult, Range, Rates, Work, codegen
from mxcompile.offline.estimate import ratio, total
from mxcompile.offline.launch import INDISTINGUISHABLE

BF16, MXFP8, MXFP4, NVFP4 = "bf16", "nvidia", "mxfp4", "nvfp4"
FP8 = ["fp8_tensor", "fp8_delayed", "fp8_rowwise", "fp8_block"]
FP4 = {MXFP4: ScaleType.E8M0, NVFP4: ScaleType.E4M3}
POW2 = "fp8_block, pow2"
_ALL = {"name": "*"}
DETAILED: dict[str, Any] = {
    POW2: {"version": 1, "preset": "fp8_block", "rules": [{"match": _ALL, "use": {"scale": "pow2"}}]},
    MXFP4: {"version": 1, "rules": [{"match": _ALL, "use": "mxfp4"}]},
}
"""Policies beside the presets, by their names in the tables."""
CHIPS = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950"]
TOKENS = 8192

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- predicted: begin -->", "<!-- predicted: end -->"


class Layer(nn.Module):
    """A decoder layer of Llama 8B from transformers, or of an eighth of its width if `small`."""

    def __init__(self, small: bool = False) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        part = 8 if small else 1
        self.width, self.head = 4096 // part, 128
        config = LlamaConfig(
            hidden_size=self.width,
            intermediate_size=14336 // part,
            num_attention_heads=32 // part,
            num_key_value_heads=8 // part,
            attn_implementation="sdpa",
        )
        self.layer = LlamaDecoderLayer(config, 0)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns the result for `x` [1, tokens, width]. cos, sin: rotary embedding [1, tokens, 128]."""
        result: Tensor = self.layer(x, position_embeddings=(cos, sin))
        return result


def generated(
    target: str,
    policy: str | dict[str, Any],
    tokens: int,
    watch: Watch | None = None,
    small: bool = False,
) -> CodegenResult:
    """Returns the layer's code for a target and policy; with `watch`, the code of its sampled steps."""
    with torch.device("meta"):
        layer = Layer(small).bfloat16()
        x = torch.empty(1, tokens, layer.width, dtype=torch.bfloat16, requires_grad=True)
        cos, sin = (torch.empty(1, tokens, layer.head, dtype=torch.bfloat16) for _ in range(2))
    return codegen(layer, x, cos, sin, target=target, policy=policy, watch=watch)


def predict(target: str, policy: str, tokens: int) -> dict[str, Any]:
    """Returns the row of one target and policy."""
    result = generated(target, DETAILED.get(policy, policy), tokens)
    return {"target": target, "policy": policy, "tokens": tokens, **row(result)}


def row(result: CodegenResult) -> dict[str, Any]:
    """Returns the figures of a step as a row.

    kernels: number of products in the report, by kernel. works: (kind, work) of each launch in order.
    """
    step = result.step
    moved: Counter[str] = Counter()
    for launch in result.launches:
        moved[launch.kind] += launch.num_bytes
    return {
        "mb": round(step.num_bytes / 1e6),
        "mb_by_kind": {kind: round(size / 1e6) for kind, size in sorted(moved.items())},
        "launches": step.launches,
        "unclear": step.unclear,
        "kernels": dict(Counter(gemm.kernel.partition(";")[0] for gemm in result.report.gemms)),
        "problems": len(result.problems),
        "spilling": sum(bool(kernel.binary.spill_bytes) for kernel in result.kernels),
        "works": [[launch.kind, launch.work.as_data()] for launch in result.launches if launch.work],
    }


def policies(target: str) -> list[str]:
    """Returns the policies to predict on `target`; FP8 and FP4 only if the chip multiplies them."""
    chip = TARGETS[target]
    fp4 = [name for name, scale in FP4.items() if scale in chip.fp4_scales]
    return [BF16, MXFP8, *(FP8 if chip.fp8_tiles else []), *([POW2] if chip.native else []), *fp4]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="*", choices=CHIPS, default=CHIPS)
    parser.add_argument("--policies", nargs="*", help="all that there are for a target")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--table", action="store_true", help="only show what is in the results")
    parser.add_argument("--write", action="store_true", help="put the tables into the pages that show them")
    options = parser.parse_args()
    for target in [] if options.table else options.targets:
        for policy in options.policies or policies(target):
            common.write("predicted", [predict(target, policy, options.tokens)])
    for page, table_of in PAGES.items() if options.write else ():
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        page.write_text(f"{before}{BEGIN}\n{table_of()}\n{END}{after}", encoding="utf-8")
    common.show(formats(options.tokens))


def newest(tokens: int) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns the newest row of each (target, policy), in the order of `CHIPS` and `policies`."""
    rows = {
        (row["target"], row["policy"]): row for row in common.read("predicted") if row["tokens"] == tokens
    }
    order = [(target, policy) for target in CHIPS for policy in policies(target)]
    return {key: rows[key] for key in order if key in rows}


def works(row: dict[str, Any], kind: str | None = None) -> list[Work]:
    """Returns the work of the launches in a row, of all or of one kind."""
    return [Work(**work) for name, work in row["works"] if kind in (None, name)]


def step_us(row: dict[str, Any], kind: str | None = None) -> Range:
    """Returns the estimated µs of a row's step, or of its launches of one kind."""
    chosen = works(row, kind)
    return Range.from_rates(lambda rates: total(chosen, rates), Rates.for_target(TARGETS[row["target"]]))


def over(rows: dict[tuple[str, str], dict[str, Any]], target: str, policy: str, base: str = BF16) -> Range:
    """Returns the step time under `policy` ÷ the step time under `base` on the same chip."""
    return ratio(works(rows[target, policy]), works(rows[target, base]), Rates.for_target(TARGETS[target]))


def casts_over_memory(row: dict[str, Any]) -> str:
    """Returns the estimated time of the casts ÷ their memory time, as text; "" without casts."""
    rates = Rates.for_target(TARGETS[row["target"]])
    casts = [work.estimate(rates) for work in works(row, "cast")]
    return f"{sum(c.us for c in casts) / sum(c.memory_us for c in casts):.2f}" if casts else ""


def table(tokens: int = TOKENS) -> list[dict[str, str]]:
    """Returns rows for MXFP8 and BF16 on each chip: the step time and its parts."""
    rows = newest(tokens)
    return [
        {
            "chip": _chip(target),
            "policy": policy,
            "step, µs ≈": step_us(layer_works).text(",.0f"),
            "of BF16's": _over_bf16(rows, target, policy),
            **{
                f"{kind}s": f"{step_us(layer_works, kind).centre:,.0f}"
                for kind in ("product", "cast", "attention")
            },
            "MB": f"{layer_works['mb']:,}",
            "casts ÷ memory": casts_over_memory(layer_works),
        }
        for (target, policy), layer_works in rows.items()
        if policy in (BF16, MXFP8)
    ]


def formats(tokens: int = TOKENS) -> list[dict[str, str]]:
    """Returns rows for every preset on each chip: the kernels of products, and the bytes moved."""
    rows = newest(tokens)
    return [
        {
            "chip": _chip(target),
            "policy": f"`{policy}`",
            "products": _products(policy, layer_works["kernels"]),
            "products MB": f"{layer_works['mb_by_kind'].get('product', 0):,}",
            "casts MB": f"{layer_works['mb_by_kind'].get('cast', 0):,}",
            "step, µs ≈": f"{step_us(layer_works).centre:,.0f}",
            "of BF16's": _over_bf16(rows, target, policy),
        }
        for (target, policy), layer_works in rows.items()
    ]


def ratios(tokens: int = TOKENS) -> list[dict[str, str]]:
    """Returns a row per chip: the MXFP8 step ÷ the BF16 step, and the preset with the fastest step."""
    rows = newest(tokens)
    return [
        {
            "chip": _chip(target),
            "MX GEMM": "native" if TARGETS[target].native else "emulated",
            "MXFP8 step ÷ BF16's, predicted": _over_bf16(rows, target, MXFP8),
            "fastest by prediction": _fastest(rows, target),
        }
        for target in dict.fromkeys(target for target, policy in rows if policy == MXFP8)
    ]


def _over_bf16(rows: dict[tuple[str, str], dict[str, Any]], target: str, policy: str) -> str:
    return "1.00" if policy == BF16 else over(rows, target, policy).text(".2f")


def _fastest(rows: dict[tuple[str, str], dict[str, Any]], target: str) -> str:
    """Returns the preset with the fastest step, and the presets that the estimate cannot distinguish."""
    presets = [policy for at, policy in rows if at == target and policy not in DETAILED]
    steps = {policy: step_us(rows[target, policy]).centre for policy in presets}
    best = min(steps, key=lambda policy: steps[policy])
    alike = [
        policy
        for policy in steps
        if policy != best and (step_ratio := over(rows, target, policy, best)).low <= 1.0 <= step_ratio.high
    ]
    names = ", ".join(_name(policy) for policy in alike)
    first = _name(best) if best in (BF16, MXFP8) else f"{_name(best)}, {_over_bf16(rows, target, best)}"
    return f"{first}; {INDISTINGUISHABLE}: {names}" if names else first


def _name(policy: str) -> str:
    return "MXFP8" if policy == MXFP8 else "BF16" if policy == BF16 else f"`{policy}`"


def _chip(target: str) -> str:
    peak = TARGETS[target].peak
    assert peak is not None
    return f"{peak.chip} ({target})"


def _products(policy: str, kernels: dict[str, int]) -> str:
    """Returns the kernels of quantized products and their numbers as text; "emulated" without any."""
    scaled: Counter[str] = Counter()
    for kernel, number in kernels.items():
        if "_scaled_mm" in kernel or "mx_" in kernel:
            scaled[_short(kernel)] += number
    words = ", ".join(f"{number} × {kernel}" for kernel, number in sorted(scaled.items()))
    return words or ("BF16" if policy == BF16 else "emulated")


def _short(kernel: str) -> str:
    """Returns a short name: `aten._scaled_mm (channel scales)` → `_scaled_mm`, channel; no tile sizes."""
    name, _, rest = kernel.removeprefix("aten.").partition(" ")
    scales = rest.removeprefix("(").removesuffix(" scales)")
    return f"`{name}`, {scales}" if name == "_scaled_mm" else f"`{name}`"


def _markdown(rows: Callable[[], list[dict[str, str]]]) -> Callable[[], str]:
    return lambda: tabulate(rows(), headers="keys", tablefmt="github", disable_numparse=True)


PAGES = {
    ROOT / "README.md": _markdown(ratios),
    ROOT / "docs" / "codegen.md": _markdown(table),
    ROOT / "docs" / "formats.md": _markdown(formats),
}
"""Tables by the page that shows them."""


if __name__ == "__main__":
    main()
