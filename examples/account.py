"""A small model to train, and the account of it: what was computed was applied, or some rank holds it back.

In float64, for every parameter: the gradients of all ranks and steps, added up, are the updates that were applied plus
the residuals that ranks hold back, their own and as owners of sums, whichever ranks there were and are.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import dgcopt
from dgcopt.collectives import AllReduce


def make(reduce: str = "gather") -> tuple[nn.Module, torch.optim.Optimizer]:
    """Residuals of everything, in many small buckets, so that some have been sent when a later gradient is lost."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 30), nn.Tanh(), nn.Linear(30, 4)).double()
    optimizer = dgcopt.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02),
        model.named_parameters(),
        dgcopt.DGC(ratio=0.03, vectors="sparse", reduce=reduce),
        op="sum",
        bucket_mb=0.002,
        first_bucket_mb=0.002,
    )
    return model, optimizer


def nothing(model: nn.Module) -> Tensor:
    return torch.zeros(sum(param.numel() for param in model.parameters()), dtype=torch.float64)


class Account:
    """Takes steps, and returns what all ranks computed and applied in each.

    `before_gradient` is called in the middle of backward, when the last bucket's gradient is about to arrive.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, before_gradient: Callable[[], None]) -> None:
        self.model = model
        self.optimizer = optimizer
        self.parameters = dict(model.named_parameters())
        self.computed: dict[str, Tensor] = {}
        next(model.parameters()).register_hook(lambda grad: before_gradient())
        for name, param in self.parameters.items():  # what arrives here has not met the optimizer yet
            param.register_hook(lambda grad, name=name: self.computed.update({name: grad.clone()}))

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        comm, optimizer = dgcopt.init(), self.optimizer
        generator = torch.Generator().manual_seed(100 * step + comm.rank)
        inputs = torch.randn(8, 20, generator=generator, dtype=torch.float64)
        targets = torch.stack([inputs[:, i::4].sum(1) for i in range(4)], 1)
        optimizer.zero_grad()
        nn.functional.mse_loss(self.model(inputs), targets).backward()
        optimizer.synchronize()
        applied = self.flat({name: param.grad for name, param in self.parameters.items()})
        with optimizer.skip_synchronize():
            optimizer.step()
        return comm.run(AllReduce(self.flat(self.computed), op="sum")), applied

    def flat(self, by_name: dict[str, Tensor]) -> Tensor:
        return torch.cat([by_name[name].detach().flatten().clone() for name in self.parameters])

    def held(self) -> Tensor:
        """What all ranks hold back."""
        memory = self.optimizer.state_dict().get("dgcopt", {"memory": {}})["memory"]
        held = nothing(self.model)
        for kind in ("residual", "residual of the owner"):
            held += self.flat(memory[kind]) if memory.get(kind) else 0
        return dgcopt.init().run(AllReduce(held, op="sum"))

    def close(self, computed: Tensor, applied: Tensor) -> None:
        """Print the account and assert that it is right, and that the replicas are equal."""
        comm, held = dgcopt.init(), self.held()
        off = float((applied + held - computed).abs().max())
        if comm.rank == 0:
            print(
                f"account on {comm.size} ranks: computed {computed.norm():.6f} = applied {applied.norm():.6f} + "
                f"held back {held.norm():.6f} (norms), off by at most {off:.2e}",
                flush=True,
            )
        assert held.norm() > 0.01 * computed.norm(), "so little is held back that its loss would not be seen"
        assert off < 1e-11, off
        dgcopt.check_replicas(self.model.state_dict(), comm=comm)


def kill_once(mark: Path) -> None:
    """Die without a word to anyone but `mark`, which says that it has happened."""
    if not mark.exists():
        mark.touch()
        print("a worker kills itself in the middle of backward", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
