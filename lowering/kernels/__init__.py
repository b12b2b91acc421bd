"""The Triton kernels, one family a file, each with its torch reference in ``lowering/reference``.

``tiles`` is what all share: device functions on register tiles, also called by Inductor templates. Importing
a file of this package imports Triton, so nothing imports them before a kernel is wanted.
"""
