"""Hypothesis without deadlines: the machine may be busy, and speed is measured in benchmarks."""

from hypothesis import settings

settings.register_profile("dgcopt", deadline=None)
settings.load_profile("dgcopt")
