"""Saving and loading the state of a wrapped optimizer: `state_dict()`, `load_state_dict()`, and their hooks."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..errors import ConfigError
from ..exchange.broadcast import broadcast_optimizer_state
from ..flat.local_shard import LocalShard, as_dtensor, is_sharded, local
from ..flat.optimizer_state import SHARD, STATE_KEY, check_shard, kept_by, own_part, put_mark, take_mark, unmarked
from ..flat.store import check_format
from .introspection import broadcasting_root
from .synchronised import steps_of

__all__ = ["Stateful", "load_state", "save_state"]

log = logging.getLogger("dgcopt")


class Stateful(Optimizer):
    """State of a wrapped optimizer, also where its class saves and loads without torch's hooks; never instantiated."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state as torch does, with this rank's memory."""
        steps = steps_of(self)
        steps.expect_hooks()
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        if steps.has_run_hooks or "param_groups" not in state:
            return state
        state = {**state, "param_groups": [dict(group) for group in state["param_groups"]]}
        return save_state(self, state) or state

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load a state as torch does. Raises ConfigError for a state of another kind of optimizer."""
        steps = steps_of(self)
        steps.expect_hooks()
        # not every optimizer's groups hold all of `defaults`: Muon's lack `differentiable`
        needed = [key for key in self.defaults if all(key in group for group in self.param_groups)]
        state, groups = self.state, self.param_groups
        try:
            super().load_state_dict(state_dict, *args, **kwargs)
            lacking = [key for key in needed if any(key not in group for group in self.param_groups)]
        except KeyError as error:
            lacking = [*map(str, error.args)]
        if lacking:
            self.state, self.param_groups = state, groups
            raise ConfigError(
                f"this state lacks {', '.join(lacking)}, which {type(self).__name__} needs: another kind of optimizer "
                f"saved it. Rebuild that optimizer, or start this one without the state."
            )
        if not steps.has_run_hooks:
            load_state(self, state_dict)
            for group, own in zip(self.param_groups, [*map(unmarked, self.param_groups)], strict=True):
                group.clear()
                group.update(own)


def save_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Add this rank's memory to a state that torch has made; a post-hook of `state_dict()`."""
    steps = steps_of(optimizer)
    steps.enter_hook()
    root = broadcasting_root()
    if root is not None:
        # Horovod's does not know this memory, and hangs if ranks keep different kinds for a parameter:
        # do its work, and leave it the settings
        broadcast_optimizer_state(optimizer, root)
        groups = [unmarked(group) for group in optimizer.state_dict()["param_groups"]]
        return {"state": {"sent": {}}, "param_groups": groups}
    engine = steps.engine
    if engine is not None:
        if not engine.runner.busy:
            steps.wrapped.commit.check(steps.comm.rank)
        state = engine.state()
        shard: dict[str, Any] = {SHARD: steps.shard()} if steps.is_sharded else {}
        state_dict[STATE_KEY] = kept_by(steps.comm.rank, steps.comm.size, **state, **shard)
        put_mark(state_dict, STATE_KEY, engine.step, state["memory"])
    return None


def load_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Take this rank's memory out of a state, and return the rest for torch; a pre-hook of `load_state_dict()`."""
    steps = steps_of(optimizer)
    steps.enter_hook()
    rank, size = steps.comm.rank, steps.comm.size
    if "param_groups" not in state_dict:
        raise ConfigError("this is no optimizer's state: optimizer.state_dict() has param_groups, a model's has none")
    groups = state_dict["param_groups"]
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in optimizer.param_groups]:
        return None  # torch refuses them: memory stays as it is
    if STATE_KEY in state_dict:
        check_format(state_dict[STATE_KEY])
        check_shard(state_dict[STATE_KEY], steps.shard())
    steps.wrapped.commit.end()
    steps.wrapped.count_taken()
    if STATE_KEY in state_dict:
        state = state_dict[STATE_KEY]
        if (state["rank"], state["world_size"]) in steps.formerly:
            state = {**state, "rank": rank, "world_size": size}
        steps.restore(own_part(state, rank, size))
    else:
        tell = steps.late_warning.set if steps.is_sharded else log.warning  # dgcopt.sharded.load follows
        if step := take_mark([dict(group) for group in groups], STATE_KEY, rank, tell):
            steps.restore(kept_by(rank, size, step))
    kept = {key: value for key, value in state_dict.items() if key != STATE_KEY}
    if steps.is_sharded:
        kept["state"] = _on_own_mesh(optimizer, state_dict)
    return {**kept, "param_groups": [unmarked(group) for group in groups]}


def _on_own_mesh(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[Any, Any]:
    """Return each parameter's state on the mesh of that parameter: another replica may have saved it."""
    saved = [key for group in state_dict["param_groups"] for key in group["params"]]
    own = [param for group in optimizer.param_groups for param in group["params"]]
    param_of = {key: LocalShard.of(param) for key, param in zip(saved, own, strict=True) if is_sharded(param)}

    def moved(value: Any, param: LocalShard) -> Any:
        is_on_a_mesh = isinstance(value, Tensor) and is_sharded(value)
        return as_dtensor(local(value), param) if is_on_a_mesh else value

    return {
        key: {name: moved(value, param_of[key]) for name, value in values.items()} if key in param_of else values
        for key, values in state_dict["state"].items()
    }
