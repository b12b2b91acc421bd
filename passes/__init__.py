"""Passes over the joint graph: aten in, aten and mx operators out.

Each pass is a frozen dataclass with `apply(graph)`. `pipeline` runs them in order, and verifies and prints
the graph after each pass. The facts about a matmul travel on its node: a `GemmTag` in ``node.meta["mx"]``.
"""

if __name__ != "mxcompile.passes":
    raise ImportError("the passes are installed as mxcompile.passes: import that, not 'passes'")
