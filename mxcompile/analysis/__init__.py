"""What a policy does to a model: planned (`explain`), measured (`audit`), searched for (`tune`)."""
