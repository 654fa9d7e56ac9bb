"""Several optimizers in one loop, fused parameters, hooks written for DDP, and collectives of the script's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import dgcopt
from dgcopt import DGC, Comm
from tests.support.wires import only

from ..training import assert_close, batch, make_model
from .pair import ADAM, COMPRESSIONS, SGD, Loop, Pair, wrap


def gathered_mean(group: Any, bucket: Any) -> Any:
    """A communication hook that gathers all gradients, and in a callback waits for an allreduce."""
    grad = bucket.buffer()
    rows = [torch.empty_like(grad) for _ in range(group.size())]

    def mean(_: Any) -> Tensor:
        total = torch.stack(rows).sum(0)
        work = torch.distributed.all_reduce(torch.ones(1, dtype=grad.dtype), group=group, async_op=True)
        return total / work.get_future().wait()[0]

    return torch.distributed.all_gather(rows, grad, group=group, async_op=True).get_future().then(mean)


def a_hook_written_for_ddp(comm: Comm) -> Loop:
    """Over any wire, though it speaks to torch.distributed."""
    pair = Pair(comm, compression=dgcopt.from_ddp_hook(None, gathered_mean))
    yield from pair.train(4)
    pair.assert_equal("a DDP hook")


def two_players(comm: Comm) -> Loop:
    """As in a GAN: the first player's loss leaves gradients at the second one, who throws them away before its own."""
    for compression in (None, DGC(1.0, overlap=True)):
        sides = []
        for whole in (True, False):
            maker, judge = make_model(seed=2), nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
            with torch.no_grad():
                for place, param in enumerate(judge.parameters()):
                    param.fill_(0.1 + 0.05 * place)
            players: list[Any] = [ADAM(maker.parameters()), SGD(judge.parameters())]
            if not whole:
                players = [wrap(players[0], maker, comm, compression), wrap(players[1], judge, comm, compression)]
            sides.append((maker, judge, players, None if whole else comm))
        for step in range(5):
            for maker, judge, (make, _), where in sides:
                make.zero_grad()
                judge(maker(batch(step, 0, where)[0])).square().mean().backward()
            yield
            for _, _, (make, _), _ in sides:
                make.step()
            yield
            for maker, judge, (_, decide), where in sides:
                decide.zero_grad()
                x, y = batch(step, 1, where)
                (judge(y) - 1).square().mean().backward()
                judge(maker(x).detach()).square().mean().backward()
            yield
            for _, _, (_, decide), _ in sides:
                decide.step()
            yield
        for place in (0, 1):
            assert_close(
                list(sides[1][place].parameters()), list(sides[0][place].parameters()), 1e-9, f"player {place}"
            )


def two_optimizers_of_one_model(comm: Comm) -> Loop:
    """One backward pass fills the buckets of both, on some ranks in another order; and their steps change places."""
    for name, ratio in (("dense", None), ("DGC at ratio 1", 1.0)):
        model = make_model()
        weights, biases = (
            wrap(torch.optim.SGD(part, 0.1), model, comm, None if ratio is None else DGC(ratio, overlap=True))
            for part in ([p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2])
        )
        whole = [param.detach().clone() for param in model.parameters()]
        for step in range(9):
            weights.zero_grad()
            biases.zero_grad()
            last = list(model.parameters())[-2]
            for rank in range(comm.size):
                for place, param in enumerate(model.parameters()):
                    if param is last and rank and step in (4, 7):
                        continue
                    grad = torch.full_like(param, 0.1 * (step + 1) * (rank + 1) * (place + 1))
                    whole[place] -= 0.1 * grad / comm.size
                    if rank == comm.rank:
                        (param * grad).sum().backward()
            yield
            for optimizer in (weights, biases) if step < 6 else (biases, weights):
                optimizer.step()
                yield
        assert_close(list(model.parameters()), whole, 1e-9, f"two optimizers, {name}")


@only(wires=["torch"], sizes=range(2, 2**10))
def what_the_script_reduces_itself(comm: Comm) -> Loop:
    """A number of its own between backward and step, where some ranks have sent buckets and others have not."""
    model = make_model()
    optimizer = wrap(torch.optim.SGD(model.parameters(), 0.1), model, comm)
    whole = [param.detach().clone() for param in model.parameters()]
    last = list(model.parameters())[-1]
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(comm.size):
            for place, param in enumerate(model.parameters()):
                if param is last and rank and step == 2:
                    continue
                grad = torch.full_like(param, 0.1 * (step + 1) * (rank + 1) * (place + 1))
                whole[place] -= 0.1 * grad / comm.size
                if rank == comm.rank:
                    (param * grad).sum().backward()
        losses = torch.full((last.numel(),), float(comm.rank), dtype=torch.float64)
        torch.distributed.all_reduce(losses)
        assert losses.unique().tolist() == [sum(range(comm.size))]
        yield
        optimizer.step()
        yield
    assert_close(list(model.parameters()), whole, 1e-9, "beside numbers of the script's own")


def fused_steps(comm: Comm) -> Loop:
    """Parameters that lie as the gradients in their buckets do."""
    for kind in (SGD, ADAM):
        for compression in COMPRESSIONS:
            makes = iter([kind, lambda params, kind=kind: dgcopt.fuse_optimizer(kind(params))])
            pair = Pair(comm, lambda params, makes=makes: next(makes)(params), COMPRESSIONS[compression])
            yield from pair.train(4)
            if compression != "DGC":
                pair.assert_equal(f"{compression}, fused")
