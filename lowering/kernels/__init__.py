"""Triton device functions that the templates call, and the choice of their tiles.

``tiles`` has the cast on register tiles, which most files use. Importing a kernel imports Triton, so other
rooms import kernels only when they need them. ``lowering/templates`` has the kernels that a graph launches;
only `zero_rows` is a kernel by itself, which runs behind a grouped product of the vendor's.
"""
