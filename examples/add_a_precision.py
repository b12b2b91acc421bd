"""Add a precision in your own process: FP6 elements with a shared scale for every 16 elements."""

from __future__ import annotations

import torch
from tiny import Model, batch

import mxcompile
from mxcompile.formats import ElemType, Precision, Tile, Tiles, precisions

E3M2 = ElemType(name="my_e3m2", dtype=torch.uint8, max=28.0, emax=4, mantissa_bits=2, min_exponent=-2, bits=6)


def main() -> None:
    """Compares the new precision with MXFP8 by an audit."""
    sixteens = Tiles(x=Tile(1, 16), w=Tile(16, 16))  # across and along the contraction
    precisions.add(Precision(name="fp6_16", label="FP6 in 16s", elems=(E3M2,), tiles={"16": sixteens}))
    torch.manual_seed(0)
    model, tokens = Model(depth=1), batch()
    least = {}
    for word in ("mxfp8", "fp6_16"):
        rule = {"match": {"role": ["ffn_in", "ffn_out"]}, "use": word}
        policy = {"version": 1, "preset": "bf16", "rules": [rule]}
        audit = mxcompile.audit(model, tokens, policy=policy)
        least[word] = min(gemm.sqnr_db for gemm in audit.numerics.gemms)
        print(f"{word}: lowest SQNR of a GEMM {least[word]:.1f} dB")
    assert least["fp6_16"] < least["mxfp8"]


if __name__ == "__main__":
    main()
