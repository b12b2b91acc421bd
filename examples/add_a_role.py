"""Try a statement about a role on a model, before you add it to the code.

ResMLP mixes tokens with a single linear layer on a residual branch. The statements of mxcompile give it the
role `other`; the statement below gives it `mixer_out`. docs/extend.md lists the files for a permanent change.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import mxcompile
from mxcompile.passes.roles import precedence
from mxcompile.passes.roles.site import Site
from mxcompile.passes.roles.statement import Fails, Holds, Statement, joins_stream
from mxcompile.policy import Role


class TokenMixing(nn.Module):
    """Computes x + mix(norm(x)), where `mix` runs over tokens, then a feed-forward network."""

    def __init__(self, tokens: int = 64, width: int = 96) -> None:
        super().__init__()
        self.mix = nn.Linear(tokens, tokens)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the residual stream after the block; `x` and the result are [batch, tokens, width]."""
        x = x + self.mix(nn.functional.rms_norm(x, x.shape[-1:]).mT).mT
        return x + self.down(nn.functional.gelu(self.up(x)))


def stands_alone(site: Site) -> Holds | Fails:
    """Returns `Holds` if no other layer lies between the residual stream and the layer of `site`."""
    if site.made and not any(source in site.model.followers for source in site.made):
        return Holds("it reads the stream and no layer before it")
    return Fails("it reads another layer")


def main() -> None:
    """Prints the role of the token-mixing layer without and with the statement."""
    model = nn.Sequential(TokenMixing(), TokenMixing())
    x = torch.randn(2, 64, 96)
    (before,) = mxcompile.explain(model, x).why("0.mix")
    statement = Statement(role=Role.MIXER_OUT, clauses=(stands_alone, joins_stream))
    precedence.STATEMENTS = (*precedence.STATEMENTS, statement)
    (after,) = mxcompile.explain(model, x).why("0.mix")
    print(f"before: {before.role}, because {before.evidence}")
    print(f"after: {after.role}, because {after.evidence}")
    assert (before.role, after.role) == ("other", "mixer_out")


if __name__ == "__main__":
    main()
