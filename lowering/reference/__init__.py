"""What the kernels of ``lowering/kernels`` compute, in plain torch operations, in files of the same names."""
