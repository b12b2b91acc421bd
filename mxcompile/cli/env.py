"""``mxcompile env``: the MXFP8 support of this machine, and the reasons for missing support."""

from __future__ import annotations

import argparse
import platform
import shutil
from typing import Any


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser("env", help="list versions, targets and the features of this machine")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status, 1 if this machine cannot compile for any device."""
    import torch
    from tabulate import tabulate

    from mxcompile.lowering.cpu.features import features
    from mxcompile.lowering.targets import TARGETS, of_device
    from mxcompile.private_names import missing, used
    from mxcompile.versions import TESTED, installed, untested

    lacking, number = missing(), sum(map(len, used().values()))
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    names = ("mxcompile", *TESTED, "torchao")
    reasons = {name: f" ({reason})" if (reason := untested(name)) else "" for name in names}
    rows = [
        ["python", platform.python_version()],
        *([name, f"{installed(name) or 'not installed'}{reasons[name]}"] for name in names),
        [
            "private names of torch and triton",
            f"missing: {', '.join(lacking)}" if lacking else f"all {number} found",
        ],
        ["CPU", features().consequence],
        ["C++ compiler", compiler or "none: the CPU backend of torch.compile needs one"],
    ]
    print(tabulate(rows, tablefmt="plain"))
    print()
    devices = ["cpu"] if compiler else []
    if torch.cuda.is_available():
        devices += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    here = {of_device(torch.device(device)).name: device for device in reversed(devices)}
    here |= {name: "cpu" for name, target in TARGETS.items() if target.device in devices}
    table = []
    for target in TARGETS.values():
        dtype = "FP32" if torch.bfloat16 in target.slow_dtypes else "BF16"
        product = target.mma or f"emulated: dequantize, then the vendor's {dtype} GEMM"
        table.append([target.name, target.chips, product, here.get(target.name, "not here")])
    print(tabulate(table, headers=["target", "chips", "MX GEMM of the chip", "device"]))
    return 0 if devices else 1
