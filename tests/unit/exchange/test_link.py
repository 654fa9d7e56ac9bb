"""Latency and bandwidth of a wire, by a clock that says how long its collectives took."""

import itertools

import pytest
import torch

import dgcopt
from dgcopt.collectives import AllGather
from dgcopt.exchange.link import measure_link


@pytest.mark.parametrize(
    ("little", "much", "latency", "bandwidth"),
    [
        (0.001, 0.011, 0.001, 2**20 / 0.010),
        (0.003, 0.003, 0.003, 2**20 / 0.0003),
        (0.003, 0.002, 0.003, 2**20 / 0.0002),
    ],
    ids=["a slow link", "no difference", "a little one that waited for longer"],
)
def test_what_it_makes_of_seconds(
    little: float, much: float, latency: float, bandwidth: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm = dgcopt.simulated_world(2)[0]
    comm.link = None  # simulated ranks have one that is known
    # read before, between and after the two, four times
    now = itertools.accumulate([0.0, little, much] * 4)
    monkeypatch.setattr("dgcopt.exchange.link.time.perf_counter", lambda: next(now))
    steps = measure_link(comm, dgcopt.DGC(reduce="auto"))
    collective = next(steps)
    with pytest.raises(StopIteration):
        while True:
            both = isinstance(collective, AllGather)
            collective = steps.send(torch.stack([collective.tensor] * 2) if both else collective.tensor)
    assert comm.link.latency == pytest.approx(latency)
    assert comm.link.bandwidth == pytest.approx(bandwidth)
