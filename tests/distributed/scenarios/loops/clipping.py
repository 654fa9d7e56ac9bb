"""Gradient clipping, of averaged and of local gradients."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import mse_loss

from dgcopt import Comm

from ..training import batch
from .pair import ADAM, SGD, Loop, Pair


def clipped(comm: Comm) -> Loop:
    """The norm of the averaged gradient: by one call, or by hand between synchronize() and skip_synchronize()."""
    for way in ("one call", "by hand"):
        for make in (SGD, ADAM):
            pair = Pair(comm, make)
            for step in range(4):
                for which, _, optimizer in pair.both():
                    optimizer.zero_grad()
                    pair.loss(which, step).backward()
                yield
                expected = nn.utils.clip_grad_norm_(pair.models[0].parameters(), 0.05)
                pair.bare.step()
                if way == "one call":
                    norm = pair.ours.clip_grad_norm_(0.05)
                    torch.testing.assert_close(norm, expected, rtol=1e-9, atol=0)
                    pair.ours.step()
                else:
                    pair.ours.synchronize()
                    nn.utils.clip_grad_norm_(pair.models[1].parameters(), 0.05)
                    with pair.ours.skip_synchronize():
                        pair.ours.step()
                yield
            pair.assert_equal(f"clipped {way}")
            assert pair.ours.telemetry.steps == 4 * (comm.size > 1) and pair.ours.telemetry.repeated == 0


def clipped_locally(comm: Comm) -> Loop:
    """Gradients changed between backward and step, after they were sent: what counts is what the step finds."""
    pair = Pair(comm)
    for step in range(8):
        pair.bare.zero_grad()
        parts = []
        for rank in range(comm.size):
            x, y = batch(step, 0, None)
            loss = mse_loss(pair.models[0](x[rank :: comm.size]), y[rank :: comm.size])
            grads = list(torch.autograd.grad(loss, list(pair.models[0].parameters())))
            norm = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]))
            parts.append([grad * (0.05 / (norm + 1e-6)).clamp(max=1) for grad in grads])
        for place, param in enumerate(pair.models[0].parameters()):
            param.grad = sum(part[place] for part in parts) / comm.size
        pair.ours.zero_grad()
        pair.loss(1, step).backward()
        nn.utils.clip_grad_norm_(pair.models[1].parameters(), 0.05)
        yield
        for optimizer in pair.optimizers:
            optimizer.step()
        yield
    pair.assert_equal("clipped locally")
    repeated = pair.ours.telemetry.repeated
    assert comm.size == 1 or 1 <= repeated <= 3, f"gradients were sent too early {repeated} times in 8 steps"
