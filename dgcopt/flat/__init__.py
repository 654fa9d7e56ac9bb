"""Flat memory: spans of parameters, buckets, gradients, and per-parameter state."""
