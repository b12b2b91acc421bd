"""Shared by the tests of the importers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mxcompile.policy import Gemm, Layer, Policy, Role
from mxcompile.policy.importers import Imported, import_policy


def imported(source: Any, folder: Path, tool: str | None = None, name: str = "config.yaml") -> Imported:
    """What is made of a file, a text or data; the file that would be written reads as the same policy."""
    path = folder / name
    text = source if isinstance(source, str) else yaml.safe_dump(source, sort_keys=False)
    path.write_text(text, encoding="utf-8")
    result = import_policy(path, tool)
    written = folder / "written.yaml"
    written.write_text(result.text(), encoding="utf-8")
    assert Policy.load(written) == result.policy
    for note in result.notes:
        assert " ".join(note.split()) in " ".join(result.text().replace("#", " ").split()) or "#" in note
    return result


def layer(name: str, module: str = "Linear", role: str = "qkv") -> Layer:
    return Layer(name=name, role=Role(role), module=module, m=64, n=64, k=64)


def sent(policy: Policy, target: Layer) -> dict[str, str]:
    """The GEMMs of the layer `target` that `policy` quantizes, and the format of its input in each."""
    chosen = {str(gemm): policy.decide(target).choice(gemm).formats for gemm in Gemm}
    return {gemm: str(formats.x) for gemm, formats in chosen.items() if formats is not None}


def in_mxfp8(policy: Policy, target: Layer) -> set[str]:
    decision = policy.decide(target)
    return {str(gemm) for gemm in Gemm if decision.choice(gemm).precision == "mxfp8"}
