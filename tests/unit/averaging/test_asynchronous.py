"""Asynchronous averaging without other ranks: what is refused, and what a single rank does."""

import math
import threading
import time

import pytest
import torch
from torch import nn

import dgcopt
from dgcopt.averaging.asynchronous import AsyncAverage
from dgcopt.comm import LocalComm
from dgcopt.errors import ConfigError
from tests.support.worlds import single, small_batch, small_model


@pytest.mark.parametrize("interval", [0, -1, math.inf, math.nan, None, "0.5", True])
def test_interval(interval):
    with pytest.raises(ConfigError, match=r"interval must be a positive number, not"):
        AsyncAverage(interval)


@pytest.mark.parametrize("steps", [-1, 1.5, None, True])
def test_warmup_steps(steps):
    with pytest.raises(ConfigError, match="warmup_steps must be a whole number of at least 0, not"):
        AsyncAverage(warmup_steps=steps)


@pytest.mark.parametrize("size", [1, 2])
def test_simulated_ranks_have_no_threads(size):
    optimizer = torch.optim.SGD(small_model().parameters(), 0.1)
    with pytest.raises(ConfigError, match="background thread, and simulated ranks take turns"):
        AsyncAverage().attach(optimizer, comm=dgcopt.simulated_world(size)[0])
    assert not hasattr(optimizer, "averaging")


@pytest.mark.parametrize("warmup_steps", [0, 3])
@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), torch.optim.AdamW])
def test_a_world_of_one_is_the_optimizer(make, warmup_steps):
    threads = set(threading.enumerate())
    model = small_model()
    optimizer = AsyncAverage(1e-3, warmup_steps).attach(make(model.parameters()), model.named_parameters(), LocalComm())
    averaging = optimizer.averaging
    for seed in range(8):
        inputs, targets = small_batch(seed=seed)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if seed == 5:
            averaging.abort()
            averaging.abort()
            averaging.resume()
        with averaging.averaged():
            assert averaging.consensus_distance() == 0
        averaging.average()
        with dgcopt.join(optimizer) if warmup_steps == 0 else torch.no_grad():
            pass
        optimizer.load_state_dict(optimizer.state_dict())
    assert set(threading.enumerate()) <= threads, "nothing runs beside it"
    assert averaging.step == 8 and averaging.telemetry.sent_bytes == 0
    for ours, theirs in zip(model.parameters(), single(make, 8), strict=True):
        assert torch.equal(ours, theirs)


def test_a_step_that_fails_midway_lets_the_thread_notify_the_others():
    """It copies no weights during a step, and would wait for the end of that one."""
    model = small_model()
    optimizer = AsyncAverage(1e-3).attach(torch.optim.SGD(model.parameters(), 0.1), comm=LocalComm())
    background = optimizer.averaging.background
    nn.functional.cross_entropy(model(small_batch()[0]), small_batch()[1]).backward()
    optimizer.step()
    background.start(optimizer.averaging.buckets())
    try:
        background.before_step()
        time.sleep(0.1)  # the thread waits by now
        raise RuntimeError("out of memory")
    except RuntimeError:
        background.leave()
    with pytest.raises(dgcopt.CommError, match=r"an exception has ended the script of rank\(s\) \[0\]"):
        background.check()
