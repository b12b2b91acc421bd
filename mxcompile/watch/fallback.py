"""GEMMs that rules of a watch moved to BF16, and the policy file that stores them.

    rule fires in step s   →   the policy file is written   →   graphs of these layers are recompiled

The GEMMs run in BF16 from step s + 1 on and never return. The file is an ordinary policy: a restarted run
with this policy continues in the same state.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from mxcompile.errors import printable
from mxcompile.policy import Gemm, Layer, Policy, keeping
from mxcompile.publish import publish
from mxcompile.report.files import rank

Below = frozenset[tuple[str, str]]
"""Pairs of a layer, by its path below a module, and a GEMM."""


class Fallbacks:
    """The GEMMs that one watch moved to BF16. path: path of the policy file, None if no rule moves any."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._layers: dict[str, Layer] = {}
        self._why: dict[str, dict[Gemm, str]] = {}
        self._policy: Policy | None = None

    def register(self, policy: Policy, layers: Iterable[Layer]) -> None:
        """Stores the `layers` of a model and the user's `policy` that they are compiled with."""
        self._policy = policy
        for layer in layers:
            self._layers.setdefault(layer.name, layer)

    def add(self, layer: str, gemm: str, why: str) -> str:
        """Moves `gemm` of the layer named `layer` to BF16. Returns the effect as text.

        Raises `OSError` if the file cannot be written; the GEMM moves to BF16 nevertheless.
        """
        if layer not in self._layers:
            return f"{layer} is not a layer of the plan, and is not changed"
        gemms = self._why.setdefault(layer, {})
        if Gemm(gemm) in gemms:
            return f"{layer} {gemm} is set to BF16 already"
        gemms[Gemm(gemm)] = why
        torch._dynamo.config.recompile_limit += 1  # this recompile must not use up the user's limit
        if self.path is not None and self._policy is not None and not rank():
            publish(self.path, self._text(self._policy))
        return f"{layer} {gemm} is in BF16 from the next step"

    def _text(self, policy: Policy) -> str:
        reasons = (why for gemms in self._why.values() for why in gemms.values())
        comments = "".join(f"# {printable(why)}\n" for why in reasons)
        head = f"# {printable(policy.label)}, with GEMMs that rules of a watch put into BF16:\n"
        return head + comments + self.over(policy).to_yaml()

    def over(self, policy: Policy) -> Policy:
        """Returns `policy` with rules that leave the GEMMs of `add` in BF16."""
        if not self._why:
            return policy
        kept = {self._layers[name]: why for name, why in self._why.items()}
        return keeping(policy, kept, f"{policy.label}, changed by a watch: {self.path}")

    def below(self, path: str) -> Below:
        """Returns the GEMMs in BF16 below the module at `path`; "" stands for the whole model."""
        start = f"{path}." if path else ""
        return frozenset(
            (name.removeprefix(path), gemm.value)
            for name, gemms in self._why.items()
            if name == path or name.startswith(start)
            for gemm in gemms
        )
