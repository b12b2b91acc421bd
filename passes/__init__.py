"""Passes over the joint graph: aten in, aten and mx operators out.

Each is a frozen dataclass with one `apply(graph)`; `pipeline` has their order, prints the IR after each and
verifies it. A matmul's findings travel on its node, as the `GemmTag` in ``node.meta["mx"]``.
"""

if __name__ != "mxcompile.passes":
    raise ImportError("the passes are installed as mxcompile.passes: import that, not 'passes'")
