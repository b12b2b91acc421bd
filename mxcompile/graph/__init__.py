"""What the layers above share about FX graphs: operator sets, names, tags, shapes, node building."""
