"""Hierarchical exchange: dense inside each machine, compressed between machines."""

from __future__ import annotations

import logging
from collections.abc import Generator, Hashable
from dataclasses import replace

import torch
from torch import Tensor

from ...coding import Checks, read_checks
from ...collectives import AllReduce, Broadcast, Collective, Exchange, watched
from ...errors import ConfigError, PayloadError
from ...flat.gradient import SparseSum
from ...flat.memory import at_least_float32, is_unsent
from ...kernels import copy_scaled, peaks
from ..base import Compressor, GradientExchange
from ..context import Context
from ..dense import checked_sum
from ..refusal import REFUSED, Refusal
from .base import Wrapper

__all__ = ["Hierarchical"]

log = logging.getLogger("dgcopt")

RANKS = "ranks per machine"
"""Shared by all ranks, per parameter name: the number of gradients that a machine's residual counts for."""

MOMENTUM = "momentum"
"""Kinds of memory that contribute to later gradients but are not residuals."""


class Hierarchical(Wrapper):
    """Averages inside each machine, then exchanges the machines' means by `inner` between their first ranks.

    (a) All ranks of a machine average their gradients, (b) its first rank exchanges that mean with the first ranks of
    other machines, (c) and broadcasts the result. Machines are weighted by their number of ranks, so the result is the
    mean over ranks; in Bagua, the source of the scheme (`hierarchical=True` of its algorithms), machines have equal
    weights. A sum is the mean times the world size.

    If a message between machines is damaged, the first rank broadcasts a refusal in place of the result, so that all
    ranks of its machine abort the step with it.

    Costs one allreduce and one broadcast of the dense gradient inside each machine, and the cost of `inner` among the
    machines, whose first ranks wait for their device once per bucket. Later rounds of buckets run one after another.

    Args:
        inner: the compressor between machines; None is NoCompression. Its memory is on the first ranks; other ranks
            pass on residuals and momentum that they got from a checkpoint of other machines.

    Raises ConfigError for a Hierarchical inside.
    """

    def __init__(self, inner: Compressor | None = None) -> None:
        super().__init__(inner)
        if any(isinstance(part, Hierarchical) for part in self.inner.parts()):
            raise ConfigError("Hierarchical cannot contain another Hierarchical. Remove one of them.")

    def _follow(self) -> None:
        super()._follow()
        self.in_turn = True  # first ranks make more rounds than others, and all ranks must broadcast in the same order

    def in_place(self, kind: Hashable) -> bool:
        return False

    def residual_content(self, kind: Hashable) -> str:
        return f"machines' {self.inner.residual_content(kind)}"

    def as_gradient(self, unsent: Tensor, ctx: Context) -> Tensor:
        return self.inner.as_gradient(unsent, ctx).mul_(ctx.size / ctx.place.nodes)

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        ranks = ctx.size / ctx.place.nodes
        if RANKS not in ctx.scratch:
            ctx.scratch[RANKS] = ranks
            if _count_for(ranks, ctx):
                yield from _hand_over_momentum(ctx)
        if ctx.place.local_rank > 0:
            ctx.memory.add_unsent(grad, weight=ranks)
        else:
            ctx.memory.add_unsent(grad, ctx.memory.idle, ranks - 1)  # the gradient contains it once already
        mean = yield AllReduce(grad, op="average", group="node")
        if ctx.place.local_rank == 0:
            mean = yield from self._between_machines(mean, ctx)
        mean = yield Broadcast(mean, root=0, group="node")
        _heed_refusal(mean, ctx)
        factor = ctx.size / ctx.divisor
        if factor == 1:
            ctx.checks.check_finite(peaks([mean]))
            return mean
        total = torch.empty_like(mean)
        ctx.checks.check_finite(copy_scaled([mean], [total], factor))
        return checked_sum(total, ctx)

    def _between_machines(self, mean: Tensor, ctx: Context) -> Exchange:
        """Exchange a machine's mean with other machines; return the mean over ranks, or a refusal in its place."""
        weight = ctx.place.local_size * ctx.place.nodes / ctx.size
        peak = copy_scaled([mean], [mean], weight)
        gain = ctx.place.gain * ctx.size / ctx.divisor
        # memory that has absorbed the machine's mean would owe it to ranks that still have their gradients
        across = replace(
            ctx.placed(rank=ctx.place.node, size=ctx.place.nodes, op="average", gain=gain),
            local=None,
            certain=False,
            checks=Checks(),
        )
        across.checks.check_finite(peak)
        try:
            result = yield from watched(self.inner.exchange(mean, across), send_across)
            if _is_finite(result, across):
                total = across.dense(result)
                ctx.tensors.clear_gaps(total)  # NaN left there by `inner` would abort the step on this machine only
                return total
            refusal = Refusal(ctx.rank, readable=True)
        except PayloadError as error:
            log.warning(
                "dgcopt: rank %s: in bucket %d, between machines, which the following counts as ranks: %s",
                *(ctx.rank, ctx.index, error),
            )
            refusal = Refusal(ctx.rank, readable=False)
        refusal.replace(mean.view(torch.uint8))
        return mean

    def payload_bytes(self, ctx: Context) -> int | None:
        return None  # depends on the rank: first ranks send more


def _count_for(ranks: float, ctx: Context) -> bool:
    """Rescale residuals from machines with other numbers of ranks to their weight there.

    Returns True if there may be any; the answer is the same on all ranks.
    """
    known = ctx.memory.shared.setdefault(RANKS, {})
    any_known = any(segment.name in known for segment in ctx.segments)
    for segment in ctx.segments:
        before = float(known.get(segment.name, ranks))
        for kind, flat in ctx.memory.items() if before != ranks else ():
            if is_unsent(kind) or kind == MOMENTUM:
                segment.view(flat).mul_(before / ranks)
        known[segment.name] = torch.tensor(ranks, dtype=torch.float64)
    return any_known


def _hand_over_momentum(ctx: Context) -> Generator[Collective, Tensor, None]:
    """Move momentum from ranks that were first ranks of other machines to the first rank of this one."""
    astray = torch.tensor([float(ctx.place.local_rank > 0 and MOMENTUM in ctx.memory)], device=ctx.device)
    if not (yield AllReduce(astray, op="sum", group="node", label="whether momentum is astray")).any():
        return
    mine, dtype = ctx.memory.take(MOMENTUM), at_least_float32(ctx.dtype)
    flat = torch.zeros(ctx.numel, dtype=dtype, device=ctx.device) if mine is None else mine.to(dtype)
    momentum = yield AllReduce(flat, op="sum", group="node", label="momentum of other machines")
    if ctx.place.local_rank == 0:
        ctx.memory.put(MOMENTUM, momentum)


def _is_finite(result: Tensor | SparseSum, across: Context) -> bool:
    """Return False if messages between machines hold NaN or Inf. Raises PayloadError for one that cannot be right."""
    to_check = [*across.checks.to_check]
    for positions, values in result.whole if isinstance(result, SparseSum) else ():
        to_check.append(values)
        if len(positions):
            across.checks.expect(
                ~across.tensors.outside(positions),
                lambda: (
                    "a message names a position that is in no parameter: it was damaged on the way, or its sender "
                    "runs another model or version"
                ),
            )
    finite: list[int] = []
    for tensor in to_check:
        if tensor.numel():
            across.checks.when_read(peaks([tensor])[0].isfinite(), finite.append)
    read_checks([across.checks])
    return all(finite) and not across.checks.refused


def _heed_refusal(mean: Tensor, ctx: Context) -> None:
    """Abort the step with PayloadError if the machine's first rank has broadcast that a message cannot be decoded."""
    words = mean[:16].clone().view(torch.int16)[:5]
    undecoded = (words[:4] == REFUSED).all() & (words[4] % 2 == 0)  # NaN in any case, which ends the step
    ctx.checks.expect(
        ~undecoded,
        lambda: (
            f"rank {ctx.rank}: in bucket {ctx.index}, the first rank of this machine has refused a message from "
            f"another machine, which its log names: it was damaged on the way, or some rank runs another model or "
            f"version"
        ),
    )


def send_across(collective: Collective) -> None:
    collective.to_group("across")
