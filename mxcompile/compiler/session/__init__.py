"""The session of each model: its plan, policies and checks."""
