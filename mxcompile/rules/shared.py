"""What a policy tells apart by name or by block, and where one compiled graph would run for both."""

from __future__ import annotations

from torch import nn

from mxcompile.graph.blocks import Blocks
from mxcompile.graph.names import user_path
from mxcompile.policy import Policy


def name_signature(
    policy: Policy, root: nn.Module, path: str, blocks: Blocks
) -> tuple[tuple[bool, ...], ...]:
    """How the names and blocks of `policy`'s rules fall on the layers below `path` in `root`, in their order.

    Equal for two modules of a class whose layers the policy does not tell apart so. blocks: those of `root`.
    """
    module = root.get_submodule(path)
    inner = [name for name, _ in module.named_modules()]
    inner += [name for name, _ in module.named_parameters()]
    full = [user_path(f"{path}.{name}".strip(".")) for name in inner]
    places = [(name, blocks.place(name)) for name in full]
    return tuple(tuple(rule.match.places(*place) for rule in policy.rules) for place in places)


def shared_code(policy: Policy, root: nn.Module, prefix: str, blocks: Blocks) -> str | None:
    """A sentence if code compiled for the module `prefix` may run for one the policy treats differently.

    Dynamo compiles a frame once for all modules of `root` whose guards are equal.
    """
    if not any(rule.match.name or rule.match.blocks for rule in policy.rules):
        return None
    module, mine = root.get_submodule(prefix), name_signature(policy, root, prefix, blocks)
    for path, other in root.named_modules():
        if type(other) is type(module) and name_signature(policy, root, path, blocks) != mine:
            return (
                f"{policy.label} tells {prefix} from {user_path(path)}, but a graph break lets both"
                f" run one compiled graph, decided for {prefix}; remove the graph break, or compile the"
                " blocks one by one with Backend(root=…, block=…)"
            )
    return None
