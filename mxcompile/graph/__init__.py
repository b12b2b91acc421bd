"""Shared tools for FX graphs: operator sets, tags, shapes, node building."""
