"""One rank's replica of the weights: its buckets, its memory, and its progress since the last round."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer

from ..collectives import AllReduce
from ..comm import Comm
from ..errors import DivergenceError
from ..exchange.parameters import check_trainable, describe, names_of_new, unique_names
from ..exchange.runner import Job
from ..exchange.scheduler import CollectiveScheduler, place_of
from ..flat.buckets import Bucket, build_buckets
from ..flat.local_shard import LocalShard, as_stepped, local_shards
from ..flat.memory import at_least_float32
from ..flat.store import Store
from ..gradients.replicas import check_shards
from .rule import Rule
from .weights import ParameterGroup, Weights

__all__ = ["Replica"]

BUCKET_BYTES = 25 * 2**20


class Replica:
    """The weights that one optimizer trains on one rank.

    Args:
        rule: the algorithm.
        optimizer: trains the weights.
        given: the names that the user has given to parameters.

    Attributes:
        names: all parameters and their names; new ones are added at the next step.
        store: the algorithm's memory by parameter name.
        weight: the weight of this rank in a mean.
        steps_since_sync: local steps since the last round that reached all ranks.
        unsynced: parameters stepped since all ranks held the same values, including parameters frozen since.
        started: True once the rule has seen the weights from which training starts.
        saved_by: number of ranks that saved the loaded state, negative if they had not merged themselves; 0 if no
            state was loaded, or once all ranks have resumed from it.
    """

    def __init__(self, rule: Rule, optimizer: Optimizer, given: dict[Tensor, str]) -> None:
        self.rule = rule
        self.optimizer = optimizer
        self._given = given
        names = unique_names(optimizer, given)
        check_trainable(names, may_be_sharded=True)
        self.names = local_shards(names)
        self._stepped = _params_of(optimizer)

    def join(self, comm: Comm) -> None:
        """Start over a wire, with empty memory."""
        self._comm = comm
        self.store = Store()
        self.weight = 1.0
        self.steps_since_sync = 0
        self.unsynced: set[Tensor] = set()
        self.started = False
        self.saved_by = 0
        self._buckets: dict[Bucket, Weights] = {}
        self._trained: list[Tensor] = []
        self._sizes: list[int] = []
        self._is_regrouped = False
        self._had_memory: dict[str, bool] = {}  # by parameter name, at the last layout

    def follow_ranks(self) -> None:
        """Adopt the current ranks of the wire, some of which were lost or are new; memory stays."""
        for bucket, ctx in self._buckets.items():
            ctx.move(replace(place_of(bucket, self._comm, "average"), kind=ctx.place.kind))

    def describe(self) -> list[str]:
        """Return the settings that must be equal on all ranks, one line each."""
        return describe(self.optimizer, self.names, {"averaging": self.rule})

    def not_finite(self, step: int, ranks: Sequence[int]) -> DivergenceError:
        """Return the error for NaN or Inf in the weights of `ranks` after a local step."""
        bad = [name for param, name in self.names.items() if not bool(param.detach().isfinite().all())]
        here = f"; here it is parameter {bad[0]!r} ({len(bad)} of {len(self.names)})" if bad else ""
        return DivergenceError(
            f"rank {self._comm.rank}: after local step {step} the weights of rank(s) {[*ranks]} hold NaN or Inf{here}. "
            f"Nothing was averaged. Lower the learning rate, clip gradients, or resume from a checkpoint."
        )

    # -- parameters and their buckets --------------------------------------------------------------------------------

    @property
    def trained(self) -> list[Tensor]:
        """The parameters that require a gradient."""
        return [param for param in self.names if param.requires_grad]

    def find_new_parameters(self) -> list[Tensor]:
        """Name and return parameters that were added to the optimizer since the last call.

        Raises ConfigError for parameters that were removed, and for parameters that would have the names of others.
        """
        stepped = _params_of(self.optimizer)
        if len(stepped) == len(self._stepped) and all(map(operator.is_, stepped, self._stepped)):
            return []
        new = names_of_new(self.optimizer, self.names, self._given, self._comm.rank)
        is_sharded = any(isinstance(param, LocalShard) for param in self.names)
        if is_sharded:
            check_shards(new, self._comm)
        check_trainable({**self.names, **new}, may_be_sharded=is_sharded)
        self.names |= (added := local_shards(new))
        self._stepped, self._is_regrouped = stepped, True
        return [*added]

    def follow(self) -> None:
        """Alias the memory of sharded parameters again where torch has replaced it."""
        for param in self.names:
            if isinstance(param, LocalShard):
                param.follow()

    def lay_out(self, start: Callable[[Bucket, Weights], None], unsynced_only: bool) -> dict[Bucket, Weights]:
        """Return the buckets of all trained or unsynced parameters, or of the latter; memory follows its parameters.

        Calls `start` for buckets that replace others. Raises ConfigError for unfrozen parameters that cannot be
        averaged.
        """
        self.follow()
        with_trained = not unsynced_only
        trained = [p for p in self.names if p.numel() and ((with_trained and p.requires_grad) or p in self.unsynced)]
        groups = self.optimizer.param_groups
        is_same = len(trained) == len(self._trained) and all(map(operator.is_, trained, self._trained))
        if is_same and not self._is_regrouped:
            if [param.numel() for param in trained] != self._sizes:
                for bucket in self._buckets:
                    for segment in bucket.segments:
                        segment.check_size()
            for bucket, ctx in self._buckets.items():
                current = groups[_kind(bucket)[0]]
                if ctx.trained_by.settings is not current:  # load_state_dict replaces the dict
                    ctx.use_settings(current)
            return self._buckets
        unfrozen = {p: self.names[p] for p in trained if p.requires_grad}
        check_trainable(unfrozen, may_be_sharded=True)
        if self._comm.joins_replicas:
            check_shards(unfrozen, self._comm)
        self._is_regrouped = False
        self.store.release()
        for bucket, memory_kind, flat in self._saved():
            self.store.put(memory_kind, bucket, flat)
        names = [self.names[param] for param in trained]
        if [*self._had_memory] != names:  # a restored layout is kept: bits depend on it
            known = {name for _, name in self.store.waiting()}
            self._had_memory = {name: not known or name in known for name in names}
        group_of = {param: i for i, group in enumerate(groups) for param in group["params"]}
        buckets = build_buckets(
            [*zip(names, trained, strict=True)],
            # a new parameter has no memory, and must not share a bucket with parameters that have
            lambda name, param: (group_of[as_stepped(param)], self._had_memory[name], self.rule.kind(name, param)),
            BUCKET_BYTES,
            BUCKET_BYTES,
            None,
            Bucket,
        )
        replaced, self._trained, self._buckets = bool(self._trained), trained, {}
        self._sizes = [param.numel() for param in trained]
        for bucket in buckets:
            group, _, kind = _kind(bucket)
            place = replace(place_of(bucket, self._comm, "average"), kind=kind, share=self.weight)
            trained_by = ParameterGroup(groups[group], self.optimizer)
            self._buckets[bucket] = Weights(place, self.store.adopt(bucket), trained_by=trained_by)
        if replaced:
            for bucket, ctx in self._buckets.items():
                start(bucket, ctx)
        return self._buckets

    def count_step(self) -> None:
        """Count a local step."""
        self.steps_since_sync += 1

    def mark_stepped(self) -> None:
        """Note the parameters that a local step changes: optimizers also step frozen ones that keep a gradient."""
        self.unsynced.update(p for p in self.names if p.requires_grad or as_stepped(p).grad is not None)

    def keep_steps(self, steps: int) -> None:
        """Note the local steps since a round that a late rank has made, all of which are still to be averaged."""
        self.steps_since_sync = steps
        self.mark_stepped()

    def exchanged(self) -> list[str]:
        """Return the names of all trained or unsynced parameters, with a remark at frozen ones."""
        return [
            f"{name}{'' if param.requires_grad else ' (frozen, not averaged since)'}"
            for param, name in self.names.items()
            if param.requires_grad or param in self.unsynced
        ]

    def start(self) -> None:
        """Note that the rule has seen the weights from which training starts, or resumes from a loaded state."""
        self.started, self.saved_by = True, 0

    def set_weight(self, weight: float, has_progress: bool = True) -> None:
        """Set the weight of this rank in a mean."""
        self.weight = weight
        for ctx in self._buckets.values():
            ctx.set_weight(weight, has_progress)

    def mark_synced(self, params: Iterable[Tensor] = (), reached_all: bool = True) -> None:
        """Note the end of a round after which all ranks hold the same values of `params`."""
        self.steps_since_sync = 0 if reached_all else max(1, self.steps_since_sync)  # some ranks lack the progress
        self.unsynced.difference_update(params)

    def rollback(self) -> None:
        """Roll memory back after a failed exchange."""
        for ctx in self._buckets.values():
            ctx.rollback()

    # -- persistence -------------------------------------------------------------------------------------------------

    def _saved(self) -> Iterable[tuple[Bucket, str, Tensor]]:
        """Yield the tensors that the rule keeps for each bucket outside its memory."""
        for bucket, ctx in self._buckets.items() if self.started else ():
            for kind, flat in self.rule.saved(ctx).items():
                yield bucket, kind, flat

    def state(self) -> dict[str, Any]:
        """Return a checkpointable copy, for `restore`."""
        state = self.store.state()
        for bucket, kind, flat in self._saved():
            state["memory"].setdefault(kind, {}).update({n: view.clone() for n, view in bucket.by_name(flat)})
        apart = [name for param, name in self.names.items() if param in self.unsynced]
        saved_by = self._comm.size
        if self.needs_merge:
            for kind in filter(self.rule.merges, state["memory"]):
                state["memory"][kind] = {name: flat * self._share for name, flat in state["memory"][kind].items()}
            saved_by = -saved_by
        layout = dict(self._had_memory)
        return {**state, "since": self.steps_since_sync, "apart": apart, "saved_by": saved_by, "had_memory": layout}

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of all weights by name, of which means are made: float32 for half precision."""
        return {n: p.detach().to(at_least_float32(p.dtype), copy=True) for p, n in self.names.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a `state`. Raises ConfigError if it does not fit the parameters."""
        self.store.restore(state, {name: param.shape for param, name in self.names.items()})
        self.steps_since_sync, self.saved_by = state["since"], state["saved_by"]
        self.unsynced = {param for param, name in self.names.items() if name in state["apart"]}
        self.started, self._buckets, self._trained = False, {}, []
        self._had_memory = dict(state.get("had_memory", {}))
        if self.saved_by == self._comm.size:
            self.store.drop("weights")

    @property
    def needs_merge(self) -> bool:
        """True if the loaded state is of another number of ranks, and these have not merged it yet."""
        return self.saved_by not in (0, self._comm.size)

    @property
    def _share(self) -> float:
        """Return the factor from this rank's part of a loaded sum to its part of the mean."""
        return self._comm.size / abs(self.saved_by)

    def merge(self, scheduler: CollectiveScheduler) -> Job:
        """Set weights and memory to the means over the ranks that saved the loaded state."""
        for bucket, ctx in self._buckets.items():
            for kind, flat in sorted(ctx.memory.items()):
                if self.rule.merges(kind):
                    label = f"{kind} of {bucket.label}"
                    ctx.memory.put(kind, (yield scheduler.start(AllReduce(flat * self._share), label)))
            weights = ctx.memory.take("weights")
            if weights is not None:
                bucket.write(weights)
        self.store.drop("weights")  # of frozen parameters, which are equal


def _params_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _kind(bucket: Bucket) -> tuple[int, bool, Hashable]:
    """Return the index of the parameter group, whether memory existed before, and the rule's kind."""
    return cast(tuple[int, bool, Hashable], bucket.kind)
