"""The hooks that Inductor calls during a compile."""
