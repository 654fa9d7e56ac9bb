"""How often a step makes the host wait for a device, counted without one; tests/unit/test_gpu.py asks a device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import dgcopt
from tests.support.waits import Waits, as_on_cuda
from tests.support.worlds import Ranks, small_model

SETTINGS = [
    dgcopt.NoCompression(),
    dgcopt.DGC(0.05, overlap=True),
    dgcopt.DGC.compact(0.05, warmup=None, overlap=True),
    dgcopt.TopK(0.05),
    dgcopt.PowerSGD(start_step=0),
    dgcopt.QSGD(),
    dgcopt.SignSGD(),
    dgcopt.EFSignSGD(),
]


@pytest.mark.parametrize("compressor", SETTINGS, ids=lambda c: type(c).__name__ + "-" + getattr(c, "indices", ""))
def test_a_step_waits_twice_and_backward_never(compressor):
    """Once for the vote, and once for all that has arrived, however many buckets and ranks there are."""
    momentum = 0.0 if isinstance(compressor, dgcopt.SignSGD) else 0.9
    with as_on_cuda():
        ranks = Ranks(
            2,
            lambda p: SGD(p, lr=0.1, momentum=momentum),
            model=lambda: small_model(torch.float32),
            compression=compressor,
            bucket_mb=0.001,
            first_bucket_mb=0.001,
        )
        ranks.step()  # the first sends nothing early
        for optimizer in ranks.optimizers:
            optimizer.zero_grad()
        inputs, targets = torch.randn(8, 12), torch.randint(5, (8,))
        losses = [nn.functional.cross_entropy(model(inputs), targets) for model in ranks.models]
        on_device = [param for model in ranks.models for param in model.parameters()]
        before = [optimizer.telemetry.payload_bytes for optimizer in ranks.optimizers]
        with Waits([*on_device, *losses]) as waits:
            for loss in losses:
                loss.backward()
            during = list(waits.found)
            sent = [optimizer.telemetry.payload_bytes for optimizer in ranks.optimizers]
            for optimizer in ranks.optimizers:
                optimizer.step()
    assert not during, during
    assert all(after > earlier for earlier, after in zip(before, sent, strict=True)), "nothing was sent during backward"
    arrives = not isinstance(compressor, dgcopt.NoCompression)
    assert len(waits.found) == (1 + arrives) * len(ranks.models), "\n".join(waits.found)
    places = {found.split(" at ")[1].split(":")[0] for found in waits.found}
    assert places <= {"gradients/tracker.py", "coding/checks.py"}


def test_waiting_reads_are_counted():
    x = torch.arange(6.0)
    host = torch.arange(3)
    with Waits([x]) as waits:
        host.tolist(), bool(host.sum() > 2), host.nonzero()
        y = 2 * x[:3]
        assert waits.found == []
        for read in (
            lambda: float(y.sum()),
            lambda: bool((y > 1).all()),
            lambda: y.tolist(),
            lambda: y.cpu(),
            lambda: y.nonzero(),
            lambda: y[y > 1],
            lambda: y.masked_select(y > 1),
            lambda: torch.equal(y, y),
            lambda: host.repeat_interleave(y.long()),
            lambda: torch.zeros(3).copy_(y).sum().item(),
        ):
            before = len(waits.found)
            read()
            assert len(waits.found) == before + 1
        y.cpu().tolist()
        assert len(waits.found) == before + 2


def test_weight_decay_apart_from_updates_does_not_wait_for_the_learning_rate():
    rates = [torch.tensor(0.01) for _ in range(2)]
    left = iter(rates)
    ranks = Ranks(2, lambda p: AdamW(p, lr=next(left), weight_decay=0.1), compression=dgcopt.TopK(0.5))
    ranks.step()
    for optimizer in ranks.optimizers:
        optimizer.zero_grad()
    ranks.backward(1)
    with Waits(rates) as waits:
        for optimizer in ranks.optimizers:
            optimizer.step()
    assert not [found for found in waits.found if " at gradients/wrapped.py" in found], "\n".join(waits.found)
