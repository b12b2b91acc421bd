"""FP8 presets on the chips that have an FP8 GEMM, from generated code: products, bytes, predicted steps.

A Llama-8B layer, forward and backward of 8,192 tokens, as in `predicted.py`: which products run on the
vendor's FP8 GEMM, what casts and products move at least, and the sum of the launches' bounds, beside BF16 and
MXFP8. Needs no GPU.
Usage: python benchmarks/fp8_targets.py [--targets sm_90 …] [--presets fp8_tensor …] [--write]
    --write   only put the table of the newest results into docs/formats.md
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import common
import predicted

from mxcompile.offline import CodegenResult

TARGETS = ["sm_90", "sm_89", "gfx942", "sm_100"]
PRESETS = ["bf16", "nvidia", "fp8_tensor", "fp8_delayed", "fp8_rowwise", "fp8_block"]
PAGE = common.ROOT / "docs" / "formats.md"
BEGIN, END = "<!-- targets: begin -->", "<!-- targets: end -->"
HEADERS = ["chip", "preset", "products", "products MB", "casts MB", "step, µs ≥", "of BF16's"]
NAME = "fp8_targets"


def row(result: CodegenResult) -> dict[str, Any]:
    """The figures of one target and preset: kernels of products by number, MB by kind of launch."""
    moved: Counter[str] = Counter()
    for launch in result.launches:
        moved[launch.kind] += launch.num_bytes
    kernels = Counter(gemm.kernel.partition(";")[0] for gemm in result.report.gemms)
    return {
        **predicted.row(result.step),
        "mb_by_kind": {kind: round(size / 1e6) for kind, size in moved.items()},
        "kernels": dict(kernels),
        "problems": len(result.problems),
        "spilling": sum(bool(kernel.binary.spill_bytes) for kernel in result.kernels),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="*", choices=TARGETS, default=TARGETS)
    parser.add_argument("--presets", nargs="*", choices=PRESETS, default=PRESETS)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    for target in [] if options.write else options.targets:
        for preset in options.presets:
            made = row(predicted.generated(target, preset, 8192))
            common.write(NAME, [{"target": target, "preset": preset, **made}])
    made_table = table(common.read(NAME))
    if options.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n{made_table}\n{END}{after}", encoding="utf-8")
    print(made_table)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: the newest figures of each target and preset."""
    newest = {(row["target"], row["preset"]): row for row in rows}
    lines = [HEADERS, ["---"] * len(HEADERS)]
    for target in TARGETS:
        for preset in PRESETS:
            found, bf16 = newest.get((target, preset)), newest.get((target, "bf16"))
            if found is not None:
                lines.append([target, f"`{preset}`", *_cells(found, bf16)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cells(found: dict[str, Any], bf16: dict[str, Any] | None) -> list[str]:
    scaled: Counter[str] = Counter()
    for kernel, number in found["kernels"].items():
        if "_scaled_mm" in kernel or "mx_" in kernel:
            scaled[_short(kernel)] += number
    words = ", ".join(f"{number} × {kernel}" for kernel, number in sorted(scaled.items()))
    moved = found["mb_by_kind"]
    over = f"{found['us'] / bf16['us']:.2f}" if bf16 else ""
    return [
        words or ("emulated" if found["preset"] != "bf16" else "BF16"),
        f"{moved.get('product', 0):,}",
        f"{moved.get('cast', 0):,}",
        f"{found['us']:,}",
        over,
    ]


def _short(kernel: str) -> str:
    """`aten._scaled_mm (channel scales)` → `_scaled_mm`, channel; a template's name without its tile."""
    name, _, rest = kernel.removeprefix("aten.").partition(" ")
    scales = rest.removeprefix("(").removesuffix(" scales)")
    return f"`{name}`, {scales}" if name == "_scaled_mm" else f"`{name}`"


if __name__ == "__main__":
    main()
