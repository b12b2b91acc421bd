"""Helpers of more than one folder of tests: models, references, backends. pytest makes them importable."""
