"""Hypothesis without deadlines: the machine may be busy, and speed is measured in benchmarks. One test, one wire."""

import pytest
from hypothesis import settings

import dgcopt

settings.register_profile("dgcopt", deadline=None)
settings.load_profile("dgcopt")


@pytest.fixture(autouse=True)
def nothing_joined() -> None:
    """No test begins on the wire that an optimizer of an earlier one has joined."""
    dgcopt.shutdown()
