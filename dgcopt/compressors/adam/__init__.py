"""Compressors of Adam's momentum, with a frozen variance."""
