"""Quantisers: send all coordinates in few bits each."""
