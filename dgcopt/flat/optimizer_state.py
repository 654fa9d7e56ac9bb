"""dgcopt's entry in an optimizer's `state_dict()`: made, checked for its rank and shard, and missed if it is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from ..errors import CheckpointError, ConfigError
from .store import Store

__all__ = [
    "SHARD",
    "STATE_KEY",
    "THROUGH_TORCH",
    "check_owner",
    "check_shard",
    "entries_in",
    "entries_of_rank",
    "kept_by",
    "own_part",
    "put_mark",
    "take_mark",
    "unmarked",
]

log = logging.getLogger("dgcopt")

STATE_KEY = "dgcopt"
"""Key of dgcopt's entry in an optimizer's `state_dict()`: rank, world_size, step, order and memory."""
MARKS = {
    STATE_KEY: ("dgcopt_step", "dgcopt_held", "the unsent gradients of all ranks"),
    "averaging": ("dgcopt_averaging_step", "dgcopt_averaging_kept", "the memory of averaging"),
}
"""For each entry in an optimizer's state: the marks for step and number of tensors, and the tensors' description. Marks
are kept in the first parameter group, since torch passes unknown keys on."""
SHARD = "shard"
"""Key for a rank's shard of sharded parameters: "rank" of "size" within the replica, "place"."""
THROUGH_TORCH = (
    "Save dgcopt.sharded.state(optimizer) through torch.distributed.checkpoint, and load it by dgcopt.sharded.load: "
    "any mesh can load that."
)
HOW_TO_KEEP = (
    "To keep them, save with dgcopt.checkpoint.save, which writes every rank's, and load with dgcopt.checkpoint.load."
)


def kept_by(
    rank: int,
    size: int,
    step: int = 0,
    order: Sequence[str] = (),
    memory: dict[str, dict[str, Tensor]] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return the `STATE_KEY` entry of rank `rank` of `size`, for a checkpoint; by default without memory.

    `order` is the order of the gradients, `memory` the tensors by kind and parameter name.
    """
    kept = {"rank": int(rank), "world_size": size, "step": step, "order": list(order)}
    return {**Store().state(), **kept, "memory": memory or {}, **more}


def check_owner(state: dict[str, Any], rank: int, size: int, owner: str, why: str) -> None:
    """Raise ConfigError if a state is another rank's; `owner` and `why` complete its text."""
    if (state["rank"], state["world_size"]) != (rank, size):
        raise ConfigError(
            f"this state{owner} belongs to rank {state['rank']} of {state['world_size']} and cannot be loaded on rank "
            f"{rank} of {size}: {why}"
        )


def check_shard(state: dict[str, Any], mine: dict[str, Any] | None) -> None:
    """Raise ConfigError if a state with memory is of other shards than `mine`; None is whole parameters."""
    theirs = state.get(SHARD)
    if theirs == mine or not (theirs or any(state["memory"].values())):
        return
    if not theirs or not mine:
        raise ConfigError(
            f"this state is of {_shard_in_words(theirs)}, and this rank has {_shard_in_words(mine)}. {THROUGH_TORCH}"
        )
    apart = [name for name in {**theirs["place"], **mine["place"]} if _place(theirs, name) != _place(mine, name)]
    more = f": parameter {apart[0]!r} lies elsewhere" if apart else ""
    raise ConfigError(
        f"this state is of {_shard_in_words(theirs)}, replica {state['rank']} of {state['world_size']}, and this rank "
        f"has {_shard_in_words(mine)}{more}. Load the file that this rank has saved (dgcopt.checkpoint.load). "
        f"Shards of another mesh: {THROUGH_TORCH[0].lower()}{THROUGH_TORCH[1:]}"
    )


def _shard_in_words(shard: dict[str, Any] | None) -> str:
    return f"shard {shard['rank']} of {shard['size']}" if shard else "whole parameters"


def _place(shard: dict[str, Any], name: str) -> Any:
    return shard["place"].get(name)


def own_part(state: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Return the part of `state` that rank `rank` of `size` may load: without memory if another rank has saved it.

    Logs a warning for lost memory. In training scripts rank 0 often saves one state for all ranks.
    """
    if (state["rank"], state["world_size"]) == (rank, size):
        return state
    lost = sorted(kind for kind, by_name in state["memory"].items() if by_name)
    if lost:
        log.warning(
            "dgcopt: rank %d of %d loads the state of rank %d of %d: step and shared state continue, but the unsent "
            "gradients of rank %d (%s) are not in it and start from zero. %s",
            *(rank, size, state["rank"], state["world_size"], rank, ", ".join(lost), HOW_TO_KEEP),
        )
    return {**state, "rank": int(rank), "world_size": size, "memory": {}}


def put_mark(state_dict: dict[str, Any], entry: str, step: int, *kept: dict[str, dict[str, Tensor]]) -> None:
    """Note the step and the number of `kept` tensors in a parameter group, so that the loss of `entry` is noticed."""
    step_mark, count_mark, _ = MARKS[entry]
    count = sum(len(by_name) for memory in kept for by_name in memory.values())
    state_dict["param_groups"][0] |= {step_mark: step, count_mark: count}


def unmarked(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a parameter group without marks."""
    marks = {mark for step, count, _ in MARKS.values() for mark in (step, count)}
    return {key: value for key, value in group.items() if key not in marks}


def take_mark(groups: list[dict[str, Any]], entry: str, rank: int, tell: Callable[..., object] = log.warning) -> int:
    """Remove an entry's mark from parameter groups, and return the step, or 0. Log by `tell` if memory is lost."""
    step_mark, count_mark, lost = MARKS[entry]
    step, count = groups[0].pop(step_mark, 0), groups[0].pop(count_mark, 0)
    if step and count:
        tell(
            "dgcopt: rank %d: the optimizer's state is of step %d, and training continues from it, but %s (%d tensors) "
            "did not come along and starts anew: it was loaded before the optimizer was wrapped, or lost its "
            "entry %r on the way. %s",
            *(rank, step, lost, count, entry, HOW_TO_KEEP),
        )
    return step


def entries_of_rank(value: Any, rank: int, size: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the STATE_KEY entries in a nested `value` with their places. Raises CheckpointError for another rank's."""
    for place, held in entries_in(value):
        if (held["rank"], held["world_size"]) != (rank, size):
            raise CheckpointError(
                f"{place} was given by rank {rank} of {size}, but is that of rank {held['rank']} of "
                f"{held['world_size']}: save each rank's own state"
            )
        yield place, held


def entries_in(value: Any, place: str = "state") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every STATE_KEY entry in a nested `value` with its place."""
    if isinstance(value, dict):
        held = value.get(STATE_KEY)
        if isinstance(held, dict) and {"rank", "world_size", "memory"} <= held.keys():
            yield place, held
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        if key != STATE_KEY:
            yield from entries_in(item, f"{place}[{key!r}]")
