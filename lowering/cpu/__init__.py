"""Kernels in C++ for CPUs, built by Inductor's tool chain (see docs/cpu.md)."""

MOST_ROWS = 16
"""Products of so many rows decode a stored weight in registers; the vendor's GEMM takes more."""
