"""Triton device functions that the templates call.

``tiles`` has the cast on register tiles, which most files use. Importing a kernel imports Triton, so other
rooms import kernels only when they need them. ``lowering/templates`` has the kernels that a graph launches;
the only kernel here is `zero_rows`, which runs after the vendor's grouped product.
"""
