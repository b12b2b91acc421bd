"""Inductor templates of the mx operators: Triton kernels with fused prologues and epilogues."""
