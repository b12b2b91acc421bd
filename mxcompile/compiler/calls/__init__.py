"""Wraps each call of compiled code: delayed scales, attribution to models, sampled steps."""
