"""The effect of a policy on a model: planned (`explain`), measured (`audit`), searched for (`tune`)."""
