"""Graph rewrites of the lowering: mx operators become operators that the target has kernels for."""
