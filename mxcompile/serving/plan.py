"""The plan of stored weights: the weights that a policy stores, in which formats, and why not the others.

    model ─▶ trace without gradients (compiler/parameter_uses) ─▶ casts of weights (passes/weights) ─▶ plan

A weight is stored exactly if ``backend="mxfp8"`` would cast it in forward, and in the same format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import Tensor, nn

from mxcompile.compiler.parameter_uses import uses
from mxcompile.errors import ModelError, PolicyError
from mxcompile.formats import is_quantized, stored_precision
from mxcompile.models.example_inputs import example_inputs
from mxcompile.models.names import user_path
from mxcompile.passes.weights import OTHER_FORMAT, WeightUse, weight_uses
from mxcompile.policy import Layer, Policy, Role
from mxcompile.rules import check_mistakes
from mxcompile.storage.weights import StoredWeight

TABLE = "it is the table of an embedding"
"""Reason why a weight is not stored."""

UNSEEN = WeightUse(
    path="", layer="", role="other", reason="no product of the traced call reads it as a matrix"
)
"""The use of a weight that the trace does not reach."""


def planned_weights(
    model: nn.Module,
    policy: Policy | str | dict[str, Any] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> dict[str, StoredWeight]:
    """Returns the decision of a policy for each matrix of a model. Warns about rules without effect.

    Args:
        model: The model; nothing in it changes.
        policy: A preset, file, dict or `Policy`; by default the preset ``inference``.
        args: Positional arguments of a call of the model; their values are not read. A Hugging Face or timm
            model needs neither `args` nor `kwargs`.
        kwargs: Keyword arguments of the call.

    Returns:
        The weights of linear layers and embeddings, then all other matrices, by path.

    Raises:
        ModelError: The model is sharded, or cannot be traced.
        PolicyError: The policy quantizes weights, but none to a format in which they can be stored.
    """
    _refuse_sharded(model)
    if not args and not kwargs:
        kwargs = example_inputs(model)
    policy = Policy.resolve("inference" if policy is None else policy)
    model_uses = uses(model, policy, args, kwargs or {}, weight_uses, training=False)
    by_path = model_uses.by_path
    tables = {path: _table(path) for path, of_path in by_path.items() if any(u.is_lookup for u in of_path)}
    check_mistakes(policy, model_uses.gemms, strict=False, tables=[*tables.values()])
    named = chain(model.named_buffers(), model.named_parameters(remove_duplicate=False))
    values = {user_path(name): value for name, value in named}
    weights = {
        path: _planned(path, values[path], own_uses, _embedding_rule(policy, tables.get(path)))
        for path, own_uses in by_path.items()
        if path in values
    }
    if not any(weight.stored for weight in weights.values()):
        precisions = {gemm.precision for gemm in model_uses.gemms if is_quantized(gemm.precision)}
        others = {OTHER_FORMAT.format(word) for word in precisions}
        if others := others & {weight.reason for weight in weights.values()}:
            raise PolicyError(f"{policy.label} stores no weight: {'; '.join(sorted(others))}")
    rest = {user_path(name): value for name, value in model.named_parameters() if value.ndim > 1}
    unseen = {path: weight_of(path, value, UNSEEN) for path, value in rest.items() if path not in weights}
    return weights | unseen


def weight_of(name: str, value: Tensor, use: WeightUse) -> StoredWeight:
    """Returns the record of the weight `name`, stored as `use` casts it.

    Args:
        name: Name of the weight.
        value: A tensor of its shape and dtype.
        use: The use that decides.
    """
    return StoredWeight(
        name=name,
        shape=tuple(value.shape),
        dtype=value.dtype,
        role=use.role,
        reason=use.reason,
        form=use.form,
        block_dim=use.block_dim - use.rank if use.form is not None else -1,
    )


def common_cast(own_uses: Sequence[WeightUse]) -> WeightUse:
    """Returns a use that represents all uses of a weight, without a format unless they share one cast."""
    keeping = next((use for use in own_uses if use.form is None), None)
    if keeping is not None:
        return keeping
    if len({(use.block_dim, use.form, use.square) for use in own_uses}) > 1:
        return replace(own_uses[0], form=None, reason="its GEMMs cast it in different ways")
    return own_uses[0]


def _refuse_sharded(model: nn.Module) -> None:
    for path, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh") and hasattr(parameter, "placements"):
            raise ModelError(
                f"{path} is sharded (a DTensor): store the weights before the model is sharded,"
                " or load a checkpoint of stored weights"
            )


def _table(path: str) -> Layer:
    """Returns an embedding as a layer for policy rules; its GEMM sizes are dummies."""
    name = path.rpartition(".")[0]
    return Layer(name=name, role=Role.EMBEDDING, module="Embedding", m=1, n=1, k=1)


def _embedding_rule(policy: Policy, table: Layer | None) -> str:
    """Returns the reason text for the rule that quantizes the embedding `table`; "" if none does."""
    if table is None:
        return ""
    index = next((i for i, rule in enumerate(policy.rules) if rule.match.fits(table)), None)
    return "" if index is None or not policy.rules[index].use.quantizes else f"policy: rule {index + 1}"


def _planned(path: str, value: Tensor, own_uses: Sequence[WeightUse], asking: str) -> StoredWeight:
    """Returns the decision for one weight. It is stored if all its readers make the same cast.

    Args:
        path: Path of the weight.
        value: The weight.
        own_uses: All uses of the weight.
        asking: The rule that quantizes the weight as an embedding, "" if none does.
    """
    own_uses = [_along_rows(use) for use in own_uses]
    layers = [use for use in own_uses if not use.is_lookup]
    keeps_table = 0 < len(layers) < len(own_uses) and not asking and all(use.form for use in layers)
    if keeps_table:
        own_uses = layers
    use = common_cast(own_uses)
    reason = use.reason
    if keeps_table and use.form is not None:
        reason += "; the embedding keeps its table"
    elif use in own_uses and use.form is None:  # this use prevents storing; another use may cast the weight
        wanted = asking or next((path_use.reason for path_use in own_uses if path_use.form is not None), "")
        if wanted:
            reason = f"{wanted}, but {TABLE if use.is_lookup else f'{use.layer} keeps it'}"
    return replace(
        weight_of(path, value, use), reason=reason, keeps_table=keeps_table and use.form is not None
    )


def _along_rows(use: WeightUse) -> WeightUse:
    """Returns `use`, without its cast if the scales are per square tile."""
    if not use.square or use.form is None:
        return use
    return replace(use, form=None, reason=OTHER_FORMAT.format(stored_precision(use.form)))
