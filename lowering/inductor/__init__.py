"""Inductor's side of the lowering: operators as Inductor IR, and passes over Inductor's scheduler."""
