"""Tools for FX graphs that the rooms above share: operator sets, names, tags, shapes, node building."""
