"""Graph rewrites of the lowering: mx operators become what a target runs."""
