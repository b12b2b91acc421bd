"""``mxcompile convert``: writes a checkpoint with the weights that a policy selects stored quantized."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mxcompile.cli.arguments import quiet


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser(
        "convert",
        help="write a copy of a checkpoint with weights in MXFP8, MXINT8, MXFP4 or NVFP4",
        description="Write a copy of a safetensors checkpoint with weights in MXFP8 or MXINT8 (half the"
        " bytes), MXFP4 or NVFP4 (a quarter), as the policy decides. IN is only read. OUT appears when it is"
        " complete; after an interruption run the same command again. Every converted weight is read back"
        " and measured.",
    )
    command.add_argument("source", metavar="IN", type=Path, help="directory of safetensors, or one file")
    command.add_argument("target", metavar="OUT", type=Path, help="directory to write, which must not exist")
    command.add_argument(
        "--policy", default="inference", metavar="PRESET|FILE", help="policy to apply (default inference)"
    )
    command.add_argument(
        "--layout",
        default="compressed-tensors",
        help="layout of OUT: compressed-tensors (default), torchao, or modelopt or mxfp8 for MXFP8",
    )
    command.add_argument(
        "--model",
        metavar="MODEL",
        help="package.module:factory of the model, where IN has no config.json of Hugging Face",
    )
    command.add_argument(
        "--dry-run", action="store_true", help="print the format of each weight, and write nothing"
    )
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status."""
    from mxcompile.checkpoint.convert import convert, plan_conversion
    from mxcompile.checkpoint.files import Checkpoint, read_json
    from mxcompile.checkpoint.layouts import COMPRESSED_TENSORS, layout_of
    from mxcompile.models.named import load_model
    from mxcompile.storage.weights import StoredWeights

    layout = layout_of(options.layout)  # before the model is built, to fail early
    with quiet():
        model = None if options.model is None else load_model(options.model)
        if options.dry_run:
            checkpoint = Checkpoint.open(options.source)
            plan = plan_conversion(checkpoint, options.policy, layout, model)
            before = checkpoint.num_bytes
            kept = (source.num_bytes for name, source in plan.sources.items() if name not in plan.weights)
            after = sum(kept) + sum(weight.num_bytes for weight in plan.weights.values())
            table = StoredWeights(weights=tuple(plan.weights.values()))
            print(f"{table}\n\n{_sizes(options, before, after)}")
            return 0
        table = convert(
            options.source, options.target, policy=options.policy, layout=options.layout, model=model
        )
    before, after = (Checkpoint.open(path).num_bytes for path in (options.source, options.target))
    print(f"{table}\n\nwritten: {_sizes(options, before, after)}")
    file = options.target / "config.json"
    raw = read_json(file) if options.layout == COMPRESSED_TENSORS and file.is_file() else {}
    if (dtype := str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16")) != "bfloat16":
        print(
            f"its config.json has dtype {dtype}, but compressed-tensors decompresses to bfloat16: load it"
            " with from_pretrained(…, dtype=torch.bfloat16)"
        )
    return 0


def _sizes(options: argparse.Namespace, before: int, after: int) -> str:
    """Returns a text with the bytes of all tensors before and after, including unchanged tensors."""
    from mxcompile.report.forms.words import byte_count

    share = f" ({after / before:.0%})" if before else ""
    return f"{options.source} {byte_count(before)}, {options.target} {byte_count(after)}{share}"
