"""Choices of kernels, forms and tiles, by formats, sizes and chip."""
