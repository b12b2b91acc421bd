"""Inductor's side of the lowering: operators as its IR, and passes over its scheduler."""
