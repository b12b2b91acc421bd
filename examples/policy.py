"""Write a policy, look at its decisions without running the model, and save it as YAML."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tiny import Model, batch

import mxcompile

POLICY = {
    "version": 1,
    "preset": "nvidia",
    "rules": [
        {"match": {"blocks": {"first": 1}}, "use": "bf16"},
        {"match": {"role": ["ffn_in", "ffn_out"]}, "use": {"grad_dtype": "e5m2", "wgrad": "bf16"}},
    ],
}


def main() -> None:
    """Prints the report of a model of four blocks under `POLICY`."""
    policy = mxcompile.Policy.from_dict(POLICY)
    report = mxcompile.explain(Model(depth=4), batch(), policy=policy, target="b200")
    print(report)
    for reason in report.why("blocks.1.down"):
        print(reason)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "policy.yaml")
        policy.dump(file)
        print(file.read_text(encoding="utf-8"))
        assert mxcompile.Policy.load(file) == policy
    precision = {(gemm.name, gemm.gemm): gemm.precision for gemm in report.gemms}
    assert precision["blocks.0.up", "fprop"] == "bf16"
    assert precision["blocks.1.up", "fprop"] == "mxfp8"
    assert precision["blocks.1.up", "wgrad"] == "bf16"


if __name__ == "__main__":
    main()
