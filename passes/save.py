"""save: mark the casts of layers' inputs that backward has to make again, by ``saved`` in the policy.

    columnwise  no mark: the partitioner saves wgrad's FP8 copy or its source
    transcode   forward saves the rowwise FP8 copy; backward makes the columnwise copy from it
    bf16        forward saves the source; backward quantizes it
    mxfp8       as columnwise; `compress` handles other saved tensors

Only backward needs a columnwise copy, so the min-cut partitioner compares its bytes with the bytes of its
source. Weights exist anyway, so backward casts them. Numerics do not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from mxcompile import ops
from mxcompile.graph.opsets import argument
from mxcompile.graph.tags import tagged
from mxcompile.graph.transpose import untransposed
from mxcompile.ops.view import Product
from mxcompile.passes.roles.flow import gemms_reading
from mxcompile.policy import Gemm, Saved


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """Marks casts that backward makes again, by ``saved`` in the tags."""

    name: ClassVar[str] = "save"

    def apply(self, graph: fx.Graph) -> None:
        """Marks the casts of `graph` that backward has to make."""
        for node, tag in tagged(graph):
            if tag.formats is None or tag.gemm is not Gemm.WGRAD:
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
            # fprop also reads the cast if it contracts the same dimension; then forward makes it anyway
            if all(reader.gemm is not Gemm.FPROP for reader in gemms_reading(cast)):
                cast.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
