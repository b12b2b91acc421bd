"""Inductor templates of the mx operators: Triton kernels that fuse with what is around them."""
