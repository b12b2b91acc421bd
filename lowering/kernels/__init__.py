"""Triton device functions that the templates call, and the tables of their tiles.

``tiles`` has what all share: the cast on register tiles. Importing a file of this package imports Triton, so
nothing imports them before a kernel is wanted. ``lowering/templates`` writes the kernels that a graph
launches; `zero_rows` alone is a kernel of its own, behind a product of the vendor's.
"""
