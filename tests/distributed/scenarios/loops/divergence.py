"""Replicas whose weights differ."""

from __future__ import annotations

import torch

import dgcopt
from dgcopt import DGC, Comm

from ..training import refused
from .pair import SGD, Loop, Pair


def replicas_come_apart(comm: Comm) -> Loop:
    """One bit on the last rank: named on every rank, or mended from rank 0."""
    last = comm.size - 1
    for on_divergence in ("raise", "resync"):
        pair = Pair(comm, SGD, DGC(0.1, overlap=True), check_replicas_every=2, on_divergence=on_divergence)
        for step in range(4):
            pair.ours.zero_grad()
            pair.loss(1, step).backward()
            if step == 2 and comm.rank == last:
                with torch.no_grad():
                    pair.models[1][2].bias[3] += 1e-12
            yield
            if step == 3 and on_divergence == "raise":
                with refused(comm, dgcopt.DivergenceError, f"rank {comm.rank}", "'2.bias'", f"rank(s) [{last}]"):
                    pair.ours.step()
                return_ = True
            else:
                pair.ours.step()
                return_ = False
            yield
            if return_:
                break
        if on_divergence == "resync" and not comm.takes_turns:
            dgcopt.check_replicas(pair.models[1].state_dict(), comm=comm)
