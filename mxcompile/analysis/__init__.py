"""Analyses of a policy on a model: planning (`explain`), measurement (`audit`) and search (`tune`)."""
