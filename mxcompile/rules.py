"""Rules that matched nothing: a typo must not pass for a decision."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import nn

from mxcompile.errors import PolicyError, nearest
from mxcompile.graph.names import user_path
from mxcompile.options import Options
from mxcompile.policy import ATTENTION_PRODUCTS, Layer, Match, Policy, Role
from mxcompile.report import GemmRecord

log = logging.getLogger(__name__)


def name_signature(policy: Policy, root: nn.Module, path: str) -> tuple[tuple[bool, ...], ...]:
    """How the name patterns of `policy` fall on the layers below `path` in `root`, in their order.

    Equal for two modules of a class whose layers the policy does not tell apart by name.
    """
    module = root.get_submodule(path)
    inner = [name for name, _ in module.named_modules()]
    inner += [name for name, _ in module.named_parameters()]
    full = [user_path(f"{path}.{name}".strip(".")) for name in inner]
    return tuple(tuple(rule.match.names(name) for rule in policy.rules) for name in full)


def shared_code(policy: Policy, root: nn.Module, prefix: str) -> str | None:
    """A sentence if code compiled for the module `prefix` may run for one the policy treats differently.

    Dynamo compiles a frame once for all modules of `root` whose guards are equal.
    """
    if not any(rule.match.name for rule in policy.rules):
        return None
    module, mine = root.get_submodule(prefix), name_signature(policy, root, prefix)
    for path, other in root.named_modules():
        if type(other) is type(module) and name_signature(policy, root, path) != mine:
            return (
                f"{policy.label} tells {prefix} from {user_path(path)} by name, but a graph break lets both"
                f" run one compiled graph, decided for {prefix}; remove the graph break, or compile the"
                " blocks one by one with Backend(root=…, block=…)"
            )
    return None


def unused_rules(policy: Policy, gemms: Iterable[GemmRecord]) -> list[str]:
    """One sentence for every rule of `policy` that matches no layer of `gemms`, and what is near."""
    products = [
        Layer(name=g.name, role=Role(g.role), module=g.module, m=g.m, n=g.n, k=g.k)
        for g in gemms
        if g.gemm == "fprop"
    ]
    layers = [product for product in products if product.role not in ATTENTION_PRODUCTS]
    sentences = []
    for number, rule in enumerate(policy.rules, 1):
        addressed = products if ATTENTION_PRODUCTS.intersection(rule.match.role) else layers
        named = [layer for layer in addressed if rule.match.fits(layer)]
        if any(rule.match.too_small(layer) is None for layer in named):
            continue
        sentence = f"{policy.label}: rule {number} matched no layer"
        if named:
            sentence += f": {named[0].name} misses {rule.match.too_small(named[0])}"
        else:
            sentence += _miss(rule.match, layers)
        sentences.append(sentence)
    return sentences


def _miss(match: Match, layers: list[Layer]) -> str:
    """What the rule's author may have meant: a layer of that name, or the names nearest to it."""
    if not match.name:
        return ""
    for layer in layers:
        if match.names(layer.name):
            return f": {layer.name} has role {layer.role} and class {layer.module}"
    names = [layer.name for layer in layers]
    return ": " + ", ".join(f"{pattern!r}{nearest(pattern, names)}" for pattern in match.name)


def check_rules(options: Options, gemms: Iterable[GemmRecord]) -> None:
    """Warn about rules that matched nothing; in strict mode raise `PolicyError`."""
    sentences = unused_rules(options.policy, gemms)
    if sentences and options.strict:
        raise PolicyError("\n".join(sentences))
    for sentence in sentences:
        log.warning("%s", sentence)
