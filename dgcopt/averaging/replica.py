"""One rank's weights: in which buckets they are exchanged, what is kept of them, and how far they have moved."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..collectives import AllReduce
from ..comm import Comm
from ..errors import DivergenceError
from ..exchange.flights import Traffic, context_of
from ..exchange.parameters import check_trainable, describe, number, unique_names
from ..exchange.runner import Job
from ..flat.buckets import Bucket, build_buckets
from ..flat.store import Store
from ..version import __version__
from .weights import Weights

if TYPE_CHECKING:
    from .base import Averaging

__all__ = ["Replica"]

BUCKET_BYTES = 25 * 2**20


class Replica:
    """The weights that one optimizer trains on one rank.

    Attributes:
        names: all parameters and their names; new ones are added at the next step.
        store: what the algorithm keeps of them.
        weight: what this rank's weights count for in a mean.
        since: local steps since the last exchange that took them to all ranks.
        apart: parameters that were trained since all ranks held the same, also if they are frozen by now.
        begun: whether the algorithm has seen the weights that it starts from.
        saved_by: how many ranks have saved the state that was loaded last, less than zero if these had yet to come
            together themselves; 0 if none was, or if all have gone on from it.
    """

    def __init__(self, rule: Averaging, optimizer: Optimizer, given: dict[Tensor, str]) -> None:
        self.rule = rule
        self.optimizer = optimizer
        self._given = given
        self.names = unique_names(optimizer, given)
        check_trainable(self.names)

    def join(self, comm: Comm) -> None:
        """Begin anew over a wire, with nothing kept."""
        self._comm = comm
        self.store = Store()
        self.weight = 1.0
        self.since = 0
        self.apart: set[Tensor] = set()
        self.begun = False
        self.saved_by = 0
        self._buckets: dict[Bucket, Weights] = {}
        self._trained: list[Tensor] = []

    def describe(self) -> list[str]:
        """What must be equal on all ranks, a line each."""
        return describe(self.optimizer, self.names, {"averaging": self.rule}, __version__)

    def not_finite(self, step: int, ranks: list[int]) -> DivergenceError:
        """The error that says that weights of `ranks` hold NaN or Inf after a local step."""
        bad = [name for param, name in self.names.items() if not bool(param.detach().isfinite().all())]
        here = f"; here it is parameter {bad[0]!r} ({len(bad)} of {len(self.names)})" if bad else ""
        return DivergenceError(
            f"rank {self._comm.rank}: after local step {step} the weights of rank(s) {ranks} hold NaN or Inf{here}. "
            f"Nothing was averaged. Lower the learning rate, clip gradients, or go back to a checkpoint."
        )

    # -- parameters and their buckets --------------------------------------------------------------------------------

    @property
    def trained(self) -> list[Tensor]:
        """The parameters that require a gradient."""
        return [param for param in self.names if param.requires_grad]

    def find_new_parameters(self) -> list[Tensor]:
        """Name the parameters that the optimizer was given since; returns them."""
        groups = self.optimizer.param_groups
        if len(self.names) == sum(len(group["params"]) for group in groups):
            return []
        new = []
        for group, settings in enumerate(groups):
            for place, param in enumerate(settings["params"]):
                if param not in self.names:
                    self.names[param] = self._given.get(param, number(group, place))
                    new.append(param)
        check_trainable(self.names)
        return new

    def lay_out(self, start: Callable[[Bucket, Weights], None]) -> dict[Bucket, Weights]:
        """The buckets of all parameters that are trained or apart; what is kept follows its parameters.

        `start` is called for buckets that replace others.
        """
        trained = [p for p in self.names if p.numel() and (p.requires_grad or p in self.apart)]
        groups = self.optimizer.param_groups
        if len(trained) == len(self._trained) and all(a is b for a, b in zip(trained, self._trained, strict=True)):
            for bucket, ctx in self._buckets.items():
                for segment in bucket.segments:
                    segment.check_size()
                ctx.group = groups[_kind(bucket)[0]]  # loaded state makes it another dict
            return self._buckets
        self.store.release()
        for bucket, what, flat in self._saved():
            self.store.put(what, bucket, flat)
        known = {name for _, name in self.store.waiting()}
        group_of = {param: i for i, group in enumerate(groups) for param in group["params"]}
        buckets = build_buckets(
            [(self.names[param], param) for param in trained],
            # what is new has no memory to share a bucket with that of others
            lambda name, param: (group_of[param], not known or name in known, self.rule.kind(name, param)),
            BUCKET_BYTES,
            BUCKET_BYTES,
            None,
            Bucket,
        )
        replace, self._trained, self._buckets = bool(self._trained), trained, {}
        for bucket in buckets:
            group, _, kind = _kind(bucket)
            place = vars(context_of(bucket, self._comm, "average", self.store)) | {"kind": kind}
            self._buckets[bucket] = Weights(**place, group=groups[group], weight=self.weight)
        if replace:
            for bucket, ctx in self._buckets.items():
                start(bucket, ctx)
        return self._buckets

    def set_weight(self, weight: float) -> None:
        """From now on this rank's weights count for so much in a mean."""
        self.weight = weight
        for ctx in self._buckets.values():
            ctx.weight = weight

    def synced(self, params: Iterable[Tensor] = (), reached_all: bool = True) -> None:
        """An exchange has ended, after which all ranks hold the same of `params`."""
        self.since = 0 if reached_all else max(1, self.since)  # what it has heard of others, not all have
        self.apart.difference_update(params)

    def roll_back(self) -> None:
        """An exchange has failed: what is kept stays as it was before."""
        for ctx in self._buckets.values():
            ctx.roll_back()

    # -- what persists -----------------------------------------------------------------------------------------------

    def _saved(self) -> Iterable[tuple[Bucket, str, Tensor]]:
        """What the algorithm keeps of each bucket beside its memory."""
        for bucket, ctx in self._buckets.items() if self.begun else ():
            for kind, flat in self.rule.saved(ctx).items():
                yield bucket, kind, flat

    def state(self) -> dict[str, Any]:
        """A copy of all that `restore` takes."""
        state = self.store.state()
        for bucket, kind, flat in self._saved():
            state["memory"].setdefault(kind, {}).update({n: view.clone() for n, view in bucket.by_name(flat)})
        apart = [name for param, name in self.names.items() if param in self.apart]
        saved_by = self._comm.size
        if self.is_to_merge:
            for kind in filter(self.rule.merges, state["memory"]):
                state["memory"][kind] = {name: flat * self._share for name, flat in state["memory"][kind].items()}
            saved_by = -saved_by
        return {**state, "since": self.since, "apart": apart, "saved_by": saved_by}

    def weights(self) -> dict[str, Tensor]:
        """A copy of all weights, by name."""
        return {name: param.detach().clone() for param, name in self.names.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave. Raises ConfigError if it does not fit the parameters."""
        self.store.restore(state, {name: param.shape for param, name in self.names.items()})
        self.since, self.saved_by = state["since"], state["saved_by"]
        self.apart = {param for param, name in self.names.items() if name in state["apart"]}
        self.begun, self._buckets, self._trained = False, {}, []
        if self.saved_by == self._comm.size:
            self.store.drop("weights")

    @property
    def is_to_merge(self) -> bool:
        """Whether what was loaded is that of another number of ranks, from whose mean these have yet to go on."""
        return self.saved_by not in (0, self._comm.size)

    @property
    def _share(self) -> float:
        """What makes a rank's part of the mean of what was loaded, which is shared out by its sum."""
        return self._comm.size / abs(self.saved_by)

    @torch.no_grad()
    def merge(self, traffic: Traffic) -> Job:
        """Another number of ranks goes on: from the mean of all weights that there were, with memory to match."""
        for bucket, ctx in self._buckets.items():
            for kind, flat in sorted(ctx.memory.items()):
                if self.rule.merges(kind):
                    ctx.memory[kind] = yield traffic.start(AllReduce(flat * self._share), f"{kind} of {bucket.label}")
            if "weights" in ctx.memory:
                bucket.write(ctx.memory.pop("weights"))
        self.store.drop("weights")  # of frozen parameters, which are equal


def _kind(bucket: Bucket) -> tuple[int, bool, Hashable]:
    """The place of the parameter group, whether anything was kept before, and what the algorithm said."""
    return cast(tuple[int, bool, Hashable], bucket.kind)
