"""One rank, for checkpoints of a single process."""

import pytest

from dgcopt.comm import LocalComm


@pytest.fixture
def comm() -> LocalComm:
    return LocalComm()
