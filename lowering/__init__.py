"""Lowering: from mx operators to what a target runs, inside TorchInductor."""

if __name__ != "mxcompile.lowering":
    raise ImportError("the lowering is installed as mxcompile.lowering: import that, not 'lowering'")
