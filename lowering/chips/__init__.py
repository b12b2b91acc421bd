"""The chips: a file each, with the `Target` that describes it. `mxcompile.lowering.targets` collects them."""
