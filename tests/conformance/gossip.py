"""Weights that are averaged with neighbours, ours beside naive ones."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam

import dgcopt
from dgcopt.averaging.base import Averaging
from tests.conformance.naive_gossip import Replicas

SIZES = (1, 2, 3, 4, 5, 8)
STEPS = 5
PLAIN = functools.partial(SGD, lr=0.1)
MOMENTUM = functools.partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAM = functools.partial(Adam, lr=0.1, weight_decay=0.01)


def two_buckets(params: Iterable[Tensor]) -> Adam:
    """Adam of two parameter groups, which are exchanged one by one."""
    first, *others = params
    return Adam([{"params": [first]}, {"params": others, "weight_decay": 0.1}], lr=0.1)


def lr_at(t: int) -> float:
    return 0.1 * 0.8**t


def average(ranks: Replicas, rule: Averaging, nodes: int = 1) -> Replicas:
    """Let `rule` average the ranks' optimizers."""
    comms = dgcopt.simulated_world(len(ranks), nodes)
    for model, optimizer, comm in zip(ranks.models, ranks.optimizers, comms, strict=True):
        rule.attach(optimizer, model.named_parameters(), comm)
    return ranks


def averaged(rule: Averaging, size: int, make=PLAIN, nodes: int = 1) -> Replicas:
    """Ranks whose optimizers `rule` averages."""
    return average(Replicas(size, make), rule, nodes)


def assert_alike(ours: Replicas, theirs: Any, lr: Callable[[int], float] = lr_at, steps: int = STEPS) -> None:
    """After each of some steps; `theirs` is a naive rule."""
    for t in range(steps):
        ours.train(t, lr(t))
        theirs.train(t, lr(t))
        torch.testing.assert_close(ours.read(), theirs.ranks.read(), rtol=1e-12, atol=1e-13)


def assert_resumes(rule: Averaging, size: int, nodes: int = 1) -> None:
    """What was saved after 3 steps goes on as if nothing had happened, to the bit, elsewhere and where it was saved."""
    ranks, others = (averaged(rule, size, two_buckets, nodes) for _ in range(2))
    for t in range(3):
        ranks.train(t, lr_at(t))
    saved = [copy.deepcopy(holder.state_dict()) for holder in (*ranks.optimizers, *ranks.models)]
    rows = []
    for t in range(3, 7):
        ranks.train(t, lr_at(t))
        rows.append(ranks.read())
    for again in (others, ranks):
        for holder, state in zip((*again.optimizers, *again.models), saved, strict=True):
            holder.load_state_dict(copy.deepcopy(state))
        for t in range(3, 7):
            again.train(t, lr_at(t))
            assert torch.equal(again.read(), rows[t - 3])


def assert_uneven(rule: Averaging, theirs: Any, lengths: tuple[int, ...], nodes: int = 1) -> None:
    """The same if ranks run out of data, and take part in rounds with the weights that they have."""
    ours = averaged(rule, len(lengths), nodes=nodes)
    joined = [contextlib.ExitStack() for _ in lengths]
    for stack, optimizer in zip(joined, ours.optimizers, strict=True):
        stack.enter_context(dgcopt.join(optimizer))
    for t in range(max(lengths)):
        for stack, length in zip(joined, lengths, strict=True):
            if t >= length:
                stack.close()
        active = [rank for rank, length in enumerate(lengths) if t < length]
        ours.train(t, lr_at(t), active)
        theirs.train(t, lr_at(t), active)
        torch.testing.assert_close(ours.read(), theirs.ranks.read(), rtol=1e-12, atol=1e-13)
    for stack in joined:
        stack.close()
    assert {optimizer.averaging.step for optimizer in ours.optimizers} == {max(lengths)}


def assert_warms_up(rule: Averaging, size: int, naively: Callable[[Replicas], Any]) -> None:
    """Two steps of dense data-parallel training, and then what `naively` makes of it."""
    ours, theirs = averaged(rule, size, MOMENTUM), Replicas(size, MOMENTUM)
    for t in range(2):
        ours.train(t, lr_at(t))
        theirs.train_densely(t, lr_at(t))
    goes_on = naively(theirs)
    for t in range(5):
        ours.train(t, lr_at(t))
        goes_on.train(t, lr_at(t))
        torch.testing.assert_close(ours.read(), theirs.read(), rtol=1e-12, atol=1e-13)


def sent(ranks: Replicas) -> list[int]:
    return [optimizer.averaging.telemetry.sent_bytes for optimizer in ranks.optimizers]


def sent_in_step(ranks: Replicas, t: int) -> list[int]:
    before = sent(ranks)
    ranks.train(t, lr_at(t))
    return [now - then for now, then in zip(sent(ranks), before, strict=True)]


def flat_numel(model: torch.nn.Module) -> int:
    """Of a bucket, with the gaps that fill blocks of 64 up."""
    return sum(-(-param.numel() // 64) * 64 for param in model.parameters())
