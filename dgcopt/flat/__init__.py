"""Flat memory: where each parameter lies in it, and which share a bucket."""
