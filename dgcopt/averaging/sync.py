"""What a rank does in one round of averaging: from the weights that local steps have made to those they go on from.

`Rounds` says when. A round that fails leaves weights and memory as they were.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..exchange.flights import Flight
from ..exchange.runner import Job, on_their_way
from ..flat.buckets import Bucket
from ..flat.gradient import is_finite
from .weights import Weights

if TYPE_CHECKING:
    from .rounds import Rounds

__all__ = ["Sync", "WeightSync"]


class Sync:
    """One rank's part in each round; made before anything is sent or changed.

    Attributes: `rounds`, whose part it is; `outers`, optimizers that step in a round, whose bytes and residuals count.
    """

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds
        self.outers: list[Any] = []

    def join(self) -> None:
        """`rounds` has joined a wire, its first or another one."""

    def set_steps_per_epoch(self, steps: int) -> None:
        """Tell schedules that count epochs how many local steps one has."""
        self.rounds.rule.set_steps_per_epoch(steps)

    def start(self, bucket: Bucket) -> None:
        """See the weights that local steps start from."""

    def add_parameters(self, params: Iterable[Tensor]) -> None:
        """The optimizer was given more parameters."""

    def stepped(self) -> None:
        """This rank has made a local step, which may have brought a round due."""

    def launch(self) -> None:
        """Begin a round that goes on beside training (`Averaging.overlap`)."""
        raise NotImplementedError

    def run(self) -> Job:
        """A round, or what is left of it. It votes, through `rounds.vote`, where all ranks meet."""
        raise NotImplementedError

    def apply(self) -> None:
        """Before a local step: take over what a round beside training has brought."""

    @property
    def under_way(self) -> bool:
        """Whether a round has begun that has not ended."""
        raise NotImplementedError

    def repeat(self) -> None:
        """Begin the round again that was under way when state was saved."""
        raise NotImplementedError

    def call_off(self) -> None:
        """Before state is loaded: wait for what was sent, and discard it, on all ranks."""

    def abandon(self) -> str:
        """Forget a round that failed; returns what an error of the wire should say beside its own words."""
        return ""

    def save(self, entry: dict[str, Any], state: dict[str, Any]) -> None:
        """Add to what `optimizer.state_dict()` holds of averaging: to the whole entry, or to the `state` in it."""

    def load(self, entry: dict[str, Any], state: dict[str, Any]) -> None:
        """Take over what `save` has added; all else is loaded already."""


class WeightSync(Sync):
    """The exchange of all weights, bucket by bucket (`Averaging.exchange`). Nothing changes before all has arrived."""

    def __init__(self, rounds: Rounds) -> None:
        super().__init__(rounds)
        self._flights: list[Flight[Bucket]] = []
        self._copies: dict[Bucket, Tensor] = {}
        self._buckets: dict[Bucket, Weights] = {}
        self._finite = True

    @torch.no_grad()
    def launch(self) -> None:
        rounds = self.rounds
        self._copy_weights()
        if not rounds.rule.meets and not self._finite:
            raise rounds.replica.not_finite(rounds.local_step, [rounds.comm.rank])
        for bucket, x in self._copies.items():
            ctx = self._buckets[bucket]
            ctx.step = rounds.local_step
            flight = Flight(bucket.label, bucket)
            self._flights.append(flight)
            rounds.runner.traffic.launch(flight, rounds.rule.exchange(x, ctx))
        self._copies = {}

    def _copy_weights(self) -> None:
        """Copy weights and settings as they are now, for the vote on an exchange and for the exchange itself."""
        if not self._copies:
            self._buckets = self.rounds.buckets()
            for bucket, ctx in self._buckets.items():
                self._copies[bucket] = bucket.read()
                ctx.group = dict(ctx.group)  # a scheduler may step before others have voted
            self._finite = all(is_finite(x) for x in self._copies.values())

    @torch.no_grad()
    def run(self) -> Job:
        rounds = self.rounds
        if rounds.rule.meets or rounds.joining:
            if not self._flights:
                self._copy_weights()
            if not (yield from rounds.vote(self._finite, rounds.replica.since > 0, self._flights)):
                self._copies = {}
                return
        if not self._flights:
            self.launch()
        yield from rounds.runner.traffic.finish(self._flights, rounds.rule.in_turn)
        if not rounds.overlaps:
            self.apply()

    @torch.no_grad()
    def apply(self) -> None:
        if not self._flights:
            return
        for flight in self._flights:
            assert isinstance(flight.result, Tensor)
            self._buckets[flight.of].settle()
            flight.of.write(flight.result)
        self._flights = []
        rounds = self.rounds
        rule, step = rounds.rule, rounds.local_step
        rounds.replica.synced(rounds.names if rule.identical(step) else (), rule.reaches_all(step))

    @property
    def under_way(self) -> bool:
        return bool(self._flights)

    def repeat(self) -> None:
        self.launch()
        self.rounds.runner.add(self.run())

    def abandon(self) -> str:
        told = on_their_way(self._flights)
        self.rounds.replica.roll_back()
        self._flights, self._copies = [], {}
        return told
