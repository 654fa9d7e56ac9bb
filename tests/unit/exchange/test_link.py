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
def test_latency_and_bandwidth_follow_from_measured_seconds(
    little: float, much: float, latency: float, bandwidth: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm = dgcopt.simulated_world(2)[0]
    comm.link = None  # simulated ranks have one that is known
    # read before, between and after the two, four times
    now = itertools.accumulate([0.0, little, much] * 4)
    monkeypatch.setattr("dgcopt.exchange.link.time.perf_counter", lambda: next(now))
    steps = measure_link(comm, dgcopt.DGC(reduce="auto"), torch.device("cpu"))
    collective = next(steps)
    with pytest.raises(StopIteration):
        while True:
            both = isinstance(collective, AllGather)
            collective = steps.send(torch.stack([collective.tensor] * 2) if both else collective.tensor)
    assert comm.link.latency == pytest.approx(latency)
    assert comm.link.bandwidth == pytest.approx(bandwidth)


def test_a_device_is_measured_by_its_own_tensors_when_it_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed begins and ends with a device that has nothing left to do, and allocates nothing."""
    comm, device, events = dgcopt.simulated_world(2)[0], torch.device("cuda", 1), list[object]()
    comm.link = None
    zeros, clock = torch.zeros, itertools.count()

    def made(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        events.append(device)
        return zeros(*shape, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append(("finished", device)))
    monkeypatch.setattr("dgcopt.exchange.link.time.perf_counter", lambda: (events.append("clock"), next(clock))[1])
    steps = measure_link(comm, dgcopt.DGC(reduce="auto"), device)
    for _ in range(3):
        events.append(type(next(steps)).__name__)
    read = [("finished", device), "clock"]
    assert events[:10] == [device, device, *read, "AllReduce", *read, "AllGather", *read]
    steps.close()
