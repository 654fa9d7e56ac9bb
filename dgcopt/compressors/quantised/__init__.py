"""Quantisers: all coordinates travel, in few bits each."""
