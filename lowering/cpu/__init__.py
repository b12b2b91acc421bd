"""Kernels in C++ for CPUs, built by Inductor's tool chain (see docs/cpu.md)."""
