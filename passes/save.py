"""save: say what of a layer's input is kept for backward, where the policy asks for more than the default.

    columnwise  the partitioner chooses between the FP8 copy wgrad reads and what it can be made from
    transcode   the rowwise FP8 copy is kept; the columnwise one is made from it in backward
    bf16        the source is kept; it is quantized in backward
    mxfp8       as columnwise; what else is kept is for `compress`

By default nothing is marked. Only backward needs a columnwise copy, so the min-cut partitioner weighs its
bytes against the bytes of its source. A weight, which is kept anyway, is cast in backward. Numerics do not
change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from mxcompile import ops
from mxcompile.graph.opsets import argument
from mxcompile.graph.tags import tag_of
from mxcompile.graph.transpose import untransposed
from mxcompile.ops.view import Product
from mxcompile.passes.flow import gemms_reading
from mxcompile.policy import Gemm, Saved


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """No options: what to keep is in the tags."""

    name: ClassVar[str] = "save"

    def apply(self, graph: fx.Graph) -> None:
        """Mark the casts of `graph` that have to be made in backward."""
        for node in graph.nodes:
            tag = tag_of(node)
            if tag is None or tag.formats is None or tag.gemm is not Gemm.WGRAD:
                continue
            if tag.saved in (Saved.COLUMNWISE, Saved.MXFP8):
                continue
            qdata, _ = Product.read(node).sides[tag.tensors.index("x")]
            cast = argument(untransposed(qdata)[0])
            if tag.saved is Saved.TRANSCODE:
                cast = argument(cast)
                if cast.target is ops.hadamard:
                    cast = argument(cast)
                if cast.target is not ops.decode:
                    continue
            # fprop reads it too where it contracts the same dimension
            if all(reader.gemm is not Gemm.FPROP for reader in gemms_reading(cast)):
                cast.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
