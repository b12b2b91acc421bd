"""Lowering of mx operators to the kernels of a target, inside TorchInductor."""

if __name__ != "mxcompile.lowering":
    raise ImportError("the lowering is installed as mxcompile.lowering: import that, not 'lowering'")
