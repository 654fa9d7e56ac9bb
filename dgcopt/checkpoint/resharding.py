"""The state of a rank, made from the states of another number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import CheckpointError, ConfigError
from ..flat.optimizer_state import SHARD, THROUGH_TORCH, entries_in, entries_of_rank


def reshare(states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """Return the state for rank `rank` of `size`, from the `states` of all ranks that saved.

    The state is that of old rank `rank % len(states)`, with its random-number states: with more ranks than before, seed
    them anew. The optimizers' memory in it is resharded with its sum over ranks preserved: rank r gets the sum of old
    ranks r, r + size, ..., or zeros if there are none. Unsent memory moves parameters by lr * sum / size, so with lr
    proportional to the number of ranks (the linear scaling rule) its effect is unchanged. The lr in the state is the
    saved one: scale it.

    Of sharded parameters, ranks must be numbered replica by replica, as in a mesh ("replicate", "shard"), and shard
    groups must keep their size: memory is shared out among the ranks of one shard.

    Nothing in `states` is changed. They are used one at a time and only if needed, so they may be read on demand.
    Raises ConfigError for a rank that does not exist, CheckpointError for states that are not of one run, or whose
    shards these ranks cannot hold.
    """
    before = len(states)
    if not before or not 0 <= rank < size:
        raise ConfigError(f"rank {rank} of {size} ranks cannot start from the states of {before}")
    first = states[rank % before]
    shards = _shards_in(first)
    if shards == 1:
        return _reshared(first, states, rank, size)
    if before % shards or size % shards:
        raise CheckpointError(
            f"the states are of parameters in {shards} shards, on {before} ranks, and {size} ranks are no multiple of "
            f"{shards}. {THROUGH_TORCH}"
        )
    of_shard = _StatesOfShard(states, rank % shards, shards)
    return _reshared(of_shard[rank // shards % len(of_shard)], of_shard, rank // shards, size // shards)


class _StatesOfShard(Sequence[dict[str, Any]]):
    """The states of the ranks that hold one shard, by replica."""

    def __init__(self, states: Sequence[dict[str, Any]], shard: int, shards: int) -> None:
        self._states, self._shard, self._shards = states, shard, shards

    def __len__(self) -> int:
        return len(self._states) // self._shards

    def __getitem__(self, replica: Any) -> Any:
        state = self._states[replica * self._shards + self._shard]
        for place, held in entries_in(state):
            found = (held.get(SHARD) or {}).get("rank", self._shard)
            if found != self._shard:
                raise CheckpointError(
                    f"{place} of rank {replica * self._shards + self._shard} is that of shard {found}, so ranks are "
                    f"not numbered replica by replica. {THROUGH_TORCH}"
                )
        return state


def _shards_in(state: dict[str, Any]) -> int:
    """Number of shards of the optimizers' parameters in a rank's state; 1 if they are whole."""
    return max(((held.get(SHARD) or {}).get("size", 1) for _, held in entries_in(state)), default=1)


def _reshared(first: dict[str, Any], states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """Return the result of `reshare`; `first` is the state of old rank `rank % len(states)`."""
    before = len(states)
    mine = copy.deepcopy(first)
    kept = dict(entries_of_rank(mine, rank % before, before))
    if rank % before and kept:
        # some compressors keep shared state on the first rank of each machine only, and rank 0 is always one
        for place, held in entries_of_rank(states[0], 0, before):
            if place in kept and "shared" in held:
                kept[place]["shared"] = copy.deepcopy(held["shared"])
    for held in kept.values():
        held |= {"rank": rank, "world_size": size}
        for by_name in held["memory"].values() if rank >= before else ():
            by_name |= {name: torch.zeros_like(tensor) for name, tensor in by_name.items()}
    for other in range(rank + size, before, size):
        theirs = dict(entries_of_rank(states[other], other, before))
        if theirs.keys() != kept.keys():
            raise CheckpointError(f"ranks {rank} and {other} gave the memory of other optimizers: {[*kept], [*theirs]}")
        for place, held in theirs.items():
            for kind, by_name in held["memory"].items():
                sums = kept[place]["memory"].setdefault(kind, {})
                for name, tensor in by_name.items():
                    if name in sums and sums[name].shape != tensor.shape:
                        raise CheckpointError(f"{place}: {kind} of {name!r} has other shapes on ranks {rank}, {other}")
                    sums[name] = sums[name] + tensor if name in sums else tensor.clone()
    return mine
