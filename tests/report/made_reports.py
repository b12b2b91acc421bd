"""Records and reports made by hand."""

from __future__ import annotations

from typing import Any

from mxcompile.report import GemmRecord, OperandFormat, Outline, OutlineNode, Part, Report

X, W, DY = (
    OperandFormat(operand=name, elem="e4m3", block="1x32", rounding="rceil") for name in ("x", "w", "dy")
)


def record(name: str = "mlp.up", gemm: str = "fprop", **changes: Any) -> GemmRecord:
    usual = {"role": "ffn_in", "m": 64, "n": 96, "k": 32, "precision": "mxfp8", "formats": (X, W)}
    return GemmRecord(name=name, gemm=gemm, **{"reason": "policy: rule 1", **usual, **changes})


def kept(name: str = "lm_head", **changes: Any) -> GemmRecord:
    usual = {"role": "head", "precision": "bf16", "reason": "role head", "formats": ()}
    return record(name, **{**usual, **changes})


def training(name: str, **changes: Any) -> list[GemmRecord]:
    operands = {"fprop": (X, W), "dgrad": (DY, W), "wgrad": (DY, X)}
    return [record(name, gemm, formats=formats, **changes) for gemm, formats in operands.items()]


def report(*gemms: GemmRecord, **part: Any) -> Report:
    return Report.from_parts([Part(gemms=gemms, **part)], target="cpu", policy="preset nvidia")


def node(
    kind: str = "gemm", *names: str, phase: str = "forward", label: str = "up", **more: str
) -> OutlineNode:
    return OutlineNode(kind=kind, phase=phase, names=names, label=label, **more)


def picture() -> Outline:
    up = {"role": "ffn_in", "gemm": "fprop", "precision": "mxfp8", "source": "model.py:12"}
    return Outline(
        nodes=(
            node("input", "", label="input"),
            node("cast", "layers.0.up", label="e4m3 rowwise", detail="e4m3 1x32 rceil, rowwise"),
            node("gemm", "layers.0.up", **up),
            node("gemm", "ünï", label="ünï", role="head", gemm="fprop", precision="bf16"),
            node("gemm", "layers.0.up", phase="backward", **{**up, "gemm": "dgrad"}),
        ),
        edges=((0, 1), (1, 2), (2, 3)),
    )


def whole_report() -> Report:
    return report(
        *training("layers.0.up", kernel="triton_mx_mm", module="Linear", source="model.py:12"),
        kept("ünï"),
        saved_bytes=10,
        saved_bytes_bf16=20,
        weights=(("layers.0.up", 5, 10, 5),),
        pass_time_us=1.5,
        graph_breaks=2,
        cache="hit",
        warnings=("a", "b"),
        outline=picture(),
    )
