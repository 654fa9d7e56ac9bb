"""SlowMo by the letter of its rule, over replicas that lie side by side: no wire, no buckets, and no shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

Groups = list[list[Tensor]]  # of parameters


def copies(groups: Iterable[Iterable[Tensor]]) -> Groups:
    return [[tensor.detach().clone() for tensor in group] for group in groups]


def owners(group: Sequence[Tensor], ranks: int) -> list[Tensor]:
    """In whose shard each element is: parameters begin at multiples of 64, and all of it is cut in equal pieces."""
    starts, length = [], 0
    for tensor in group:
        starts.append(length)
        length += (tensor.numel() + 63) // 64 * 64
    piece = (length + ranks - 1) // ranks
    places = [torch.arange(start, start + t.numel()).view(t.shape) for start, t in zip(starts, group, strict=True)]
    return [place // piece for place in places]


def pieced_together(replicas: Sequence[Groups]) -> Groups:
    """Of each element the value that its owner has."""
    whole = copies(replicas[0])
    for number, group in enumerate(whole):
        for place, (tensor, owner) in enumerate(zip(group, owners(group, len(replicas)), strict=True)):
            for rank, replica in enumerate(replicas):
                tensor[owner == rank] = replica[number][place][owner == rank]
    return whole


def average(replicas: Sequence[Groups]) -> None:
    for number, group in enumerate(replicas[0]):
        for place in range(len(group)):
            mean = sum(replica[number][place].detach() for replica in replicas) / len(replicas)
            for replica in replicas:
                replica[number][place].copy_(mean)


@torch.no_grad()
def slowmo(
    start: Groups,
    gradient: Callable[[int, int, Groups], Groups],
    make: Callable[[Groups], Optimizer],
    lrs: Sequence[Sequence[float]],
    ranks: int,
    every: int,
    base_frequency: int,
    momentum: float,
    slow_lr: float,
    exact: bool = True,
    late: bool = False,
    begin: tuple[Groups, Groups, int] | None = None,
) -> list[list[Groups]]:
    """Weights of every rank after every step.

    `gradient(step, rank, weights)`; `lrs`, for every step those of the groups; `begin`, an anchor, a momentum and a
    step to go on from.
    """
    replicas = [copies(start) for _ in range(ranks)]
    optimizers = [make(replica) for replica in replicas]
    anchors = [copies(start if begin is None else begin[0]) for _ in range(ranks)]
    momenta = [copies(begin[1]) if begin else [[torch.zeros_like(t) for t in g] for g in start] for _ in range(ranks)]
    history = []
    for step, rates in enumerate(lrs, 1 if begin is None else begin[2] + 1):
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            gradients = gradient(step, rank, replica)
            for group, grads, lr in zip(optimizer.param_groups, gradients, rates, strict=True):
                group["lr"] = lr
                for param, grad in zip(group["params"], grads, strict=True):
                    param.grad = grad
            optimizer.step()
        if late and step == 1:
            anchors = [pieced_together(replicas) if exact else copies(replica) for replica in replicas]
        slow = (momentum != 0 or slow_lr != 1) and step % every == 0
        if step % base_frequency == 0 and not (slow and exact):
            average(replicas)
        if slow:
            if exact:
                average(replicas)
            for replica, anchor, moment in zip(replicas, anchors, momenta, strict=True):
                for number, lr in enumerate(rates):
                    for x, old, u in zip(replica[number], anchor[number], moment[number], strict=True):
                        if lr > 0:
                            u.copy_(momentum * u + (old - x) / lr)
                            old.copy_(old - slow_lr * lr * u)
                        else:
                            old.copy_(old + slow_lr * (x - old))
                        x.copy_(old)
        history.append([copies(replica) for replica in replicas])
    return history
