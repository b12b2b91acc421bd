"""The plan of stored weights: the weights that a policy stores, in which formats, and why not the others.

    model ─▶ trace without gradients (compiler/parameter_uses) ─▶ casts of weights (passes/weights) ─▶ plan

A weight is stored exactly if ``backend="mxfp8"`` would cast it in forward, and in the same format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from mxcompile.compiler.parameter_uses import uses
from mxcompile.errors import ModelError, PolicyError
from mxcompile.formats import is_quantized, stored_precision
from mxcompile.models.names import user_path
from mxcompile.passes.weights import OTHER_FORMAT, WeightUse, common_cast, weight_uses
from mxcompile.policy import Layer, Policy, Role
from mxcompile.rules import check_mistakes
from mxcompile.storage.tensor import MXTensor, stored_bytes
from mxcompile.storage.weights import StoredWeight

TABLE = "it is the table of an embedding"
"""Reason why a weight is not stored."""
BUFFER = "it is a buffer: only parameters are stored"
"""Reason why a weight is not stored."""

UNSEEN = WeightUse(
    path="", layer="", role="other", reason="no compiled product of the traced call reads it as a matrix"
)
"""The use of a weight that the trace does not reach."""


def planned_weights(
    model: nn.Module,
    policy: Policy | str | dict[str, Any] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> dict[str, StoredWeight]:
    """Returns the decision of a policy for each matrix of a model. Warns about rules without effect.

    The weights of linear layers and embeddings come first, then all other matrices, by path. Arguments and
    errors are as for `quantize_weights_`; `model` does not change.
    """
    for path, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh") and hasattr(parameter, "placements"):
            raise ModelError(
                f"{path} is sharded (a DTensor): store the weights before the model is sharded,"
                " or load a checkpoint of stored weights"
            )
    policy = Policy.resolve("inference" if policy is None else policy)
    model_uses = uses(model, policy, args, kwargs, weight_uses, training=False)
    named = model.named_parameters(remove_duplicate=False)
    buffers = {user_path(name): value for name, value in model.named_buffers()}
    values = buffers | {user_path(name): value for name, value in named}
    by_path = {path: own_uses for path, own_uses in model_uses.by_path.items() if path in values}
    lookups = [path for path, own_uses in by_path.items() if any(use.is_lookup for use in own_uses)]
    tables = [_table(path, values[path]) for path in lookups]
    check_mistakes(policy, model_uses.gemms, strict=False, tables=tables)
    weights = {path: _planned(path, values[path], own_uses, policy) for path, own_uses in by_path.items()}
    for path, weight in weights.items():
        if path in buffers and weight.form is not None and not isinstance(values[path], MXTensor):
            weights[path] = replace(weight, form=None, keeps_table=False, reason=BUFFER)
    if not any(weight.stored for weight in weights.values()):
        precisions = {gemm.precision for gemm in model_uses.gemms if is_quantized(gemm.precision)}
        others = {OTHER_FORMAT.format(word) for word in precisions}
        if others := others & {weight.reason for weight in weights.values()}:
            raise PolicyError(f"{policy.label} stores no weight: {'; '.join(sorted(others))}")
    rest = {user_path(name): value for name, value in model.named_parameters() if value.ndim > 1}
    unseen = {path: weight_of(path, value, UNSEEN) for path, value in rest.items() if path not in weights}
    return weights | unseen


def weight_of(name: str, value: Tensor, use: WeightUse) -> StoredWeight:
    """Returns the record of the weight `name`, stored as `use` casts it. value: has its shape and dtype."""
    return StoredWeight(
        name=name,
        shape=tuple(value.shape),
        dtype=value.dtype,
        held_bytes=stored_bytes(value),
        role=use.role,
        reason=use.reason,
        form=use.form,
        block_dim=use.block_dim - use.rank if use.form is not None else -1,
    )


def _table(path: str, value: Tensor) -> Layer:
    """Returns the embedding with the weight `value` at `path` as a layer, for policy rules."""
    name = path.rpartition(".")[0]
    return Layer(
        name=name, role=Role.EMBEDDING, module="Embedding", m=None, n=value.shape[0], k=value.shape[-1]
    )


def _planned(path: str, value: Tensor, own_uses: Sequence[WeightUse], policy: Policy) -> StoredWeight:
    """Returns the decision for one weight. It is stored if all its readers make the same cast.

    A table that an embedding shares with layers is stored as the layers need it. The embedding keeps its
    table if a rule has it in BF16 or blocks do not run along rows; else it reads rows of the stored table.
    """
    layers = [
        replace(use, form=None, reason=OTHER_FORMAT.format(stored_precision(use.form)))
        if use.square and use.form is not None  # scales for square tiles are never stored
        else use
        for use in own_uses
        if not use.is_lookup
    ]
    lookup = next((use for use in own_uses if use.is_lookup), None)
    ruled = None if lookup is None else _ruled(lookup, value, policy)
    readers = layers
    if lookup is not None and (not layers or (ruled is not None and ruled.form is not None)):
        readers = [*layers, ruled or lookup]
    use = common_cast(readers)
    reason, keeps_table = use.reason, False
    if use.form is not None and layers and lookup is not None:
        keeps_table = use.block_dim != use.rank - 1 or (ruled is not None and ruled.form is None)
        rule = f" ({ruled.reason})" if keeps_table and ruled is not None else ""
        reason += f"; the embedding {'keeps its table' if keeps_table else 'reads its rows'}{rule}"
    elif use in readers and use.form is None:  # this use prevents storing; another use may cast the weight
        wanted = next((reader.reason for reader in readers if reader.form is not None), "")
        if wanted:
            reason = f"{wanted}, but {use.layer} keeps it"
    is_table = lookup is not None and not keeps_table
    return replace(weight_of(path, value, use), reason=reason, is_table=is_table, keeps_table=keeps_table)


def _ruled(lookup: WeightUse, value: Tensor, policy: Policy) -> WeightUse | None:
    """Returns `lookup` with the format of the policy's rule for the embedding; None without a rule."""
    table = _table(lookup.path, value)
    if policy.rule_for(table) is None:
        return None
    choice = policy.decide(table).fprop
    if choice.formats is None:
        return replace(lookup, reason=choice.reason)
    if not choice.formats.w.storable:
        return replace(lookup, reason=OTHER_FORMAT.format(choice.precision))
    rank = value.ndim
    return replace(lookup, reason=choice.reason, form=choice.formats.w, block_dim=rank - 1, rank=rank)
