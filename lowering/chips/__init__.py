"""A file for each chip, with the `Target` that describes it. `mxcompile.lowering.targets` collects them."""
