"""Which weights of a model a policy stores quantized, and along which dimension: asked of the passes.

    model ─▶ trace without gradients (compiler/uses) ─▶ what its products cast (passes/weights)

So a weight is stored exactly where ``backend="mxfp8"`` would cast it in forward, in that format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from mxcompile.compiler.uses import uses
from mxcompile.errors import PolicyError
from mxcompile.formats import Format, is_quantized, stored_precision
from mxcompile.passes.weights import OTHER_FORMAT, WeightUse, weight_uses
from mxcompile.policy import Layer, Policy, Role
from mxcompile.rules import check_mistakes

TABLE = "it is the table of an embedding"
"""Why a weight is not stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageChoice:
    """The decision for one parameter.

    role: of its layers, the first of several. reason: why it is stored quantized, or why not. block_dim: the
    dimension its blocks run along, negative. form: what it is cast to; None where it is not stored so. apart:
    whether its layers get a stored copy, because an embedding reads it too, as it is.
    """

    role: str
    reason: str
    block_dim: int = -1
    form: Format | None = None
    apart: bool = False


def choose(
    model: nn.Module, policy: Policy, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, StorageChoice]:
    """Returns the decision of `policy` for each linear weight or embedding of `model`, by parameter path.

    args, kwargs: what the model is called with; their values are not looked at. Rules that do nothing are
    warned about. Raises `ModelError` where the model cannot be traced, and `PolicyError` for a policy that
    quantizes weights, but none to what they can be stored in.
    """
    model_uses = uses(model, policy, args, kwargs, weight_uses, training=False)
    tables = {
        path: _table(path) for path, each in model_uses.by_path.items() if any(use.is_lookup for use in each)
    }
    check_mistakes(policy, model_uses.gemms, strict=False, tables=[*tables.values()])
    chosen = {
        path: _decided(each, _asking(policy, tables.get(path))) for path, each in model_uses.by_path.items()
    }
    if any(each.form for each in chosen.values()):
        return chosen
    precisions = {gemm.precision for gemm in model_uses.gemms if is_quantized(gemm.precision)}
    others = {OTHER_FORMAT.format(word) for word in precisions} & {each.reason for each in chosen.values()}
    if others:
        raise PolicyError(f"{policy.label} stores no weight: {'; '.join(sorted(others))}")
    return chosen


def _table(path: str) -> Layer:
    """An embedding as rules see layers; its sizes are not sizes of a product."""
    name = path.rpartition(".")[0]
    return Layer(name=name, role=Role.EMBEDDING, module="Embedding", m=1, n=1, k=1)


def _asking(policy: Policy, table: Layer | None) -> str:
    """The rule that asks for `table` to be quantized, as a reason says it; "" if none does."""
    if table is None:
        return ""
    index = next((i for i, rule in enumerate(policy.rules) if rule.match.fits(table)), None)
    return "" if index is None or not policy.rules[index].use.quantizes else f"policy: rule {index + 1}"


def _along_rows(use: WeightUse) -> WeightUse:
    """`use`, without a cast if its scales are of square tiles."""
    if not use.square or use.form is None:
        return use
    return replace(use, form=None, reason=OTHER_FORMAT.format(stored_precision(use.form)))


def _decided(weight_uses: Sequence[WeightUse], asking: str) -> StorageChoice:
    """One decision from all that is done with a weight: it is stored if that is one and the same cast.

    asking: the rule that asks for it as an embedding to be quantized, "" if none does.
    """
    weight_uses = [_along_rows(use) for use in weight_uses]
    layers = [use for use in weight_uses if not use.is_lookup]
    apart = 0 < len(layers) < len(weight_uses) and not asking and all(use.form for use in layers)
    weight_uses = layers if apart else weight_uses
    first = weight_uses[0]
    keeping = next((use for use in weight_uses if use.form is None), None)
    if keeping is not None:
        wanted = asking or next((use.reason for use in weight_uses if use.form is not None), "")
        obstacle = TABLE if keeping.is_lookup else f"{keeping.layer} keeps it"
        reason = f"{wanted}, but {obstacle}" if wanted else keeping.reason
        return StorageChoice(role=keeping.role, reason=reason)
    formats = {(use.block_dim, use.form) for use in weight_uses}
    if len(formats) > 1:
        return StorageChoice(role=first.role, reason="its layers cast it in different ways")
    return StorageChoice(
        role=first.role,
        reason=f"{first.reason}; the embedding keeps its table" if apart else first.reason,
        block_dim=first.block_dim - first.rank,
        form=first.form,
        apart=apart,
    )
