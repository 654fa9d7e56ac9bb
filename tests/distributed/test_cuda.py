"""Two real ranks that share one CUDA device: a launch, a test per scenario. Skipped where there is none."""

import functools
import os

import pytest
import torch

from tests.distributed.scenarios.catalogue import ON_CUDA
from tests.distributed.scenarios.cuda import DEVICE
from tests.support.launching import PROGRAMS, Outcome, assert_ended, assert_passed, launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="no CUDA device on this machine"
    ),
]


@functools.cache
def outcome() -> Outcome:
    env = {"DGCOPT_TEST_JOIN_FIRST": "torch", "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    return launch("torch", 2, [str(PROGRAMS / "worker.py"), *ON_CUDA], limit=300, env=env)


@pytest.mark.parametrize("name", ON_CUDA)
def test_scenario(name: str) -> None:
    assert_passed("torch", 2, outcome(), name)


def test_ends() -> None:
    assert_ended(outcome())
