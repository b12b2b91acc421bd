"""Delayed scales, attribution and sampled steps, around each call of compiled code."""
