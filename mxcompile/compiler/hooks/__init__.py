"""The hooks that Inductor calls in a compile."""
