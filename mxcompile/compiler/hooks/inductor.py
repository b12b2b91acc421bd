"""Wraps the hooks as passes and a partitioner for Inductor's configuration, with the settings that they need.

`config_patches` sets both for a compile. The uuid of a hook covers everything that its result depends on,
so that entries of Inductor's caches can be reused and are never stale.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn

from mxcompile.compiler.session.options import NEEDED
from mxcompile.graph.tags import KEY, tags_of
from mxcompile.ops.view import arguments_of, call_of
from mxcompile.versions import installed

GraphModules = tuple[fx.GraphModule, fx.GraphModule]

_WITH_STATE = (
    torch.ops.higher_order.run_and_save_rng_state,
    torch.ops.higher_order.run_with_rng_state,
    torch.ops.higher_order.graphsafe_run_with_rng_state,
)


def sources() -> list[Path]:
    """Returns mxcompile's source files. Two folders of a checkout are links, which a glob does not follow."""
    root = Path(__file__).parents[2]
    trees = (root, root / "passes", root / "lowering")
    return sorted(
        {path.resolve() for tree in trees for end in ("py", "h") for path in tree.rglob(f"*.{end}")}
    )


@functools.cache
def sources_hash() -> str:
    """Returns a hash of mxcompile's sources and of the versions of PyTorch and Triton."""
    digest = hashlib.sha256(f"{torch.__version__} {installed('triton')}".encode())
    for path in sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()


def settings() -> str:
    """Returns the configuration of Inductor and AOTAutograd as text that is equal in all processes."""
    vectors = torch.backends.cpu.get_cpu_capability()  # Inductor generates code for it, its key lacks it
    modules = (config, functorch_config)
    return repr([vectors, *(sorted(module.save_config_portable().items()) for module in modules)])


def with_needed(requested: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns `requested` with the `NEEDED` settings, and a warning that lists the changed settings."""
    needed = {key: value for key, value in NEEDED.items() if hasattr(config, key)}
    changed = [key for key, value in needed.items() if requested.get(key, getattr(config, key)) != value]
    if not changed:
        return {**requested, **needed}, ()
    words = ", ".join(f"{key}={needed[key]}" for key in changed)
    warning = f"Inductor's settings are changed for graphs that mxcompile compiles, which needs {words}"
    return {**requested, **needed}, (warning,)


class _Hook:
    """The hook `function`, beside the hooks `users` that the user has set in the same place."""

    def __init__(self, function: Callable[..., None], uuid: str, users: Any) -> None:
        self._function = function
        self._uuid = uuid
        self._users = users if isinstance(users, list | tuple) else [users] if users else []

    def uuid(self) -> Any:
        """Returns the key for Inductor's caches, or None (no caching) if a hook of the user has none."""
        ids = [user.uuid() if hasattr(user, "uuid") else None for user in self._users]
        return None if None in ids else (self._uuid, *ids)


class GraphPass(_Hook, CustomGraphPass):
    """A pass that runs `function` after the user's passes of the same hook."""

    def __call__(self, graph: fx.Graph) -> None:
        """Runs the user's passes, then `function`."""
        for before in self._users:
            before(graph)
        self._function(graph)


class Partitioner(_Hook, CustomPartitionerFn):
    """The user's partitioner, or Inductor's. Passes the forward and backward graphs to `function`."""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> GraphModules:
        """Partitions `gm`, then calls `function` with both graphs and the number of forward outputs."""
        partition: Any = self._users[0] if self._users else min_cut_rematerialization_partition
        graphs: GraphModules = partition(gm, joint_inputs, **kwargs)
        for part in graphs:
            _tag_wrapped(gm.graph, part.graph)
        self._function(graphs, kwargs["num_fwd_outputs"])
        return graphs

    def __deepcopy__(self, memo: object) -> Partitioner:
        return self

    def __reduce__(self) -> Any:
        """Pickles only the uuid, because cache keys pickle Inductor's configuration."""
        return str, (repr(self.uuid()),)


def _tag_wrapped(joint: fx.Graph, part: fx.Graph) -> None:
    """Copies the metadata of random operators from `joint` to their wrappers in `part`, except their values.

    The partitioner wraps a random operator, such as an attention, that also runs in backward, and drops its
    metadata.
    """
    wrapped = {_call(node): node for node in part.nodes if node.target in _WITH_STATE}
    for node in joint.nodes if wrapped else ():
        if tags_of(node) and isinstance(node.target, torch._ops.OpOverload) and _call(node) in wrapped:
            wrapper = wrapped[_call(node)]
            for result in wrapper.users:
                result.meta.pop(KEY, None)
            meta = {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")}
            wrapper.meta |= meta


def _call(node: fx.Node) -> str:
    called, _ = call_of(node)
    return f"{called} {arguments_of(node)}"
