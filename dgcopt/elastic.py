"""Continue when workers are lost or join, with the unsent gradients of lost ones.

    optimizer = dgcopt.DistributedOptimizer(torch.optim.SGD(...), model.named_parameters(), dgcopt.DGC())
    state = dgcopt.elastic.State("/shared/run1", model=model, optimizer=optimizer, epoch=0, batch=0)

    @dgcopt.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 90):
            ...
            state.commit()

    train(state)

Under Horovod Elastic the remaining workers continue in the same process. Under torchrun all workers restart the script
and continue from the newest commit too.

With Horovod's own TorchState the optimizer rejoins by itself too, but a commit stays in each worker's memory, so a
residual dies with its worker. Here a commit is a checkpoint of all ranks in a directory that all machines share, which
`dgcopt.checkpoint.load` reshards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from . import checkpoint
from .comm import current_comm, horovod_torch, init, shutdown
from .errors import CheckpointError, ConfigError
from .exchange.broadcast import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .exchange.held import held
from .flat.optimizer_state import STATE_KEY, kept_by

if TYPE_CHECKING:
    from horovod.common.elastic import State as _HorovodsState
else:
    _HorovodsState = object  # the package can be imported without Horovod

__all__ = ["State", "run"]


def run(train: Callable[..., Any]) -> Callable[..., Any]:
    """Make `train`, a function of a State, continue from the newest commit: `hvd.elastic.run` under every launcher.

    Under Horovod Elastic it is called again whenever workers are lost or join. Elsewhere it is called once: a launcher
    that continues after a loss (`torchrun --max-restarts`) restarts the script.
    """

    if not callable(train):
        raise ConfigError(f"dgcopt.elastic.run takes a function of a State, not {train!r:.200}")

    @functools.wraps(train)
    def synchronised(state: Any, *args: Any, **kwargs: Any) -> Any:
        if current_comm().elastic:
            return horovod_torch().elastic.run(train)(state, *args, **kwargs)
        state.sync()
        return train(state, *args, **kwargs)

    return synchronised


def State(directory: str | Path, *, model: nn.Module, optimizer: Optimizer, **values: Any) -> Any:
    """The state to which training returns after workers are lost or join; over Horovod, its own elastic `State` too.

    Args:
        directory: the folder of commits, shared by all machines. If it holds any, training continues from the newest.
        model: its parameters and buffers; after a loss, each rank takes those of one rank.
        optimizer: as `DistributedOptimizer` or an algorithm of `dgcopt.averaging` returned it, for all ranks.
        values: attributes that are committed, such as the position in training. Tensors, numbers, text, None, and
            dicts, lists and tuples of them, of rank 0; and objects with `state_dict()` and `load_state_dict()`, such as
            a scheduler, of each rank. A number named `step` names the commits; without it they are counted.

    Methods, besides those for `run`:
        `commit()` writes a checkpoint and then checks for added and removed hosts. Collective.
        `check_host_updates()` only checks; if the hosts have changed, it commits first.
        `sync()` loads the newest commit, or takes rank 0's state and returns False if there is none. Collective; `run`
        does it.
        `register_reset_callbacks(callbacks)`: called on every rank, new ones too, after a commit is loaded, so that
        none keeps a learning rate that was scaled for another number of ranks.

    As in every Horovod Elastic script, nothing between wrapping the optimizer and `run` may be collective: workers that
    join later would wait for it alone. Parameters need no broadcast: `run` begins with rank 0's. An error in the middle
    of a step loses the steps since the last commit.

    Give `dgcopt.init(deadline=...)` fewer seconds than the default: a remaining worker may wait that long for one that
    has already failed. Horovod 0.28.1 as released sometimes hangs after a worker has died: about once in ten times here
    when a collective is enqueued, or until the deadline if one is enqueued during its shutdown. The build of
    scripts/install_horovod.sh does not hang. Horovod Elastic has no groups "node" and "across": Horovod aborts if
    process sets are registered.

    With averaging, training continues from the mean of all ranks' weights at the commit, those of lost ranks too; it is
    taken right before the first step. `AsyncAverage` cannot be used under Horovod Elastic.

    Raises ConfigError for an optimizer that is not distributed, or only over some ranks, where ranks survive the loss
    of others (`dgcopt.survive`), and for values named like a method; CheckpointError, at `sync`, for commits of other
    values.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"dgcopt.elastic.State needs the model, not {model!r:.200}")
    member = _member(optimizer)
    if member is None:
        raise ConfigError(
            "dgcopt.elastic.State needs the optimizer that DistributedOptimizer, or an algorithm of "
            "dgcopt.averaging, returned"
        )
    if member.comm.survives:
        raise ConfigError(
            "dgcopt.elastic.State loads a commit on all ranks, but dgcopt.init(survive=True) keeps the state of live "
            "ranks: use dgcopt.survive.State, and dgcopt.checkpoint.save within dgcopt.survive.complete"
        )
    kind: type[_State] = _over_horovod() if member.comm.wire == "horovod" else _Fixed
    return kind(directory, model, optimizer, values)


def _member(optimizer: Any) -> Any:
    """Return the averaging of an optimizer's weights, or of its gradients, which rejoins; None for neither."""
    return held(optimizer).averaging or held(optimizer).gradients


@functools.cache
def _over_horovod() -> type[_State]:
    """Return `_Rejoining` as a subclass of Horovod's State, imported at first use."""
    from horovod.common.elastic import State as base

    return type("State", (_Rejoining, base), {"__module__": __name__, "__doc__": State.__doc__})


class _State:
    """The commits of any wire."""

    def __init__(self, directory: str | Path, model: nn.Module, optimizer: Any, values: dict[str, Any]) -> None:
        self._member = _member(optimizer)  # of the current world
        everyone = current_comm() if self._comm.wire == "horovod" else self._comm
        if {self._comm, getattr(held(optimizer).gradients, "comm", self._comm)} != {everyone} or everyone.is_part:
            raise ConfigError("dgcopt.elastic.State needs an optimizer of all ranks: wrap it without process_set")
        self.model = model
        self.optimizer = optimizer
        self._directory = directory
        self._parts = {name: value for name, value in values.items() if hasattr(value, "load_state_dict")}
        self._names = [name for name in values if name not in self._parts]
        self._commits = 0
        self._after_loading: list[Callable[[], None]] = []
        if taken := [name for name in values if hasattr(self, name) or hasattr(_Rejoining, name)]:
            raise ConfigError(f"dgcopt.elastic.State has {taken[0]!r} itself: give that value another name")
        self._set(values)

    @property
    def _comm(self) -> Any:
        return self._member.comm

    def save(self) -> None:
        """Write the next checkpoint. Users call `commit()`."""
        values = self._values_of_rank_0()
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "values": values}
        state["parts"] = {name: part.state_dict() for name, part in self._parts.items()}
        number = values.get("step", self._commits + 1)
        checkpoint.save(self._directory, state, number, self._comm)
        self._commits = number

    def sync(self) -> bool:
        """Load the newest commit; without one, take rank 0's state, and return False."""
        found = checkpoint.load(self._directory, self._comm)
        if found is None:
            broadcast_parameters(self.model.state_dict(), comm=self._comm)
            broadcast_optimizer_state(self.optimizer, comm=self._comm)
            self._set(self._values_of_rank_0())
            self._commits = 0
            return False
        self._commits, state = found
        values, parts = state.get("values", {}), state.get("parts", {})
        if values.keys() != set(self._names) or parts.keys() != self._parts.keys():
            raise CheckpointError(
                f"rank {self._comm.rank}: a commit in {self._directory} has the values {[*values]} and states of "
                f"{[*parts]}, but this State has {self._names} and {[*self._parts]}: give it the same, or another "
                f"directory"
            )
        # a single rank commits no memory, and later residuals must not stay
        nothing = kept_by(self._comm.rank, self._comm.size)
        kept = {STATE_KEY: nothing} | state["optimizer"]
        self._take_over(self.model, state["model"], "model")
        self._take_over(self.optimizer, kept, "optimizer, or one of other parameters")
        for name, part in self._parts.items():
            part.load_state_dict(parts[name])
        self._set(values)
        for callback in self._after_loading:
            callback()
        return True

    def _take_over(self, part: Any, state: dict[str, Any], kind: str) -> None:
        try:
            part.load_state_dict(state)
        except Exception as error:
            if type(error) not in (RuntimeError, ValueError):  # torch's own; other errors name the fault
                raise
            lines = [line.strip(" \t.") for line in str(error).splitlines()] or ["?"]
            raise CheckpointError(
                f"rank {self._comm.rank}: the newest commit in {self._directory} is of another {kind}: "
                f"{lines[min(1, len(lines) - 1)]}; take the one that it was saved with, or another directory"
            ) from error

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Register callbacks as Horovod does; they run after the commit is loaded, which would undo their changes."""
        self._after_loading.extend(callbacks)

    def _values_of_rank_0(self) -> dict[str, Any]:
        return broadcast_object({name: getattr(self, name) for name in self._names}, comm=self._comm)

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


class _Fixed(_State):
    """A State whose ranks stay the same for as long as the process lives."""

    def commit(self) -> None:
        self.save()

    def check_host_updates(self) -> None:
        """Hosts do not change."""


class _Rejoining(_State, _HorovodsState):
    """A State over Horovod Elastic; its base class there listens for changes of hosts."""

    def __init__(self, directory: str | Path, model: nn.Module, optimizer: Any, values: dict[str, Any]) -> None:
        self._joined = True
        # Horovod's, which comes after _State
        super(_State, self).__init__(
            bcast_object=lambda value: broadcast_object(value, comm=self._comm), get_rank=lambda: self._comm.rank
        )
        super().__init__(directory, model, optimizer, values)

    def restore(self) -> None:
        """Delete the gradients of the failed step; `sync` restores the rest, once the remaining ranks are known."""
        for param in self.model.parameters():
            param.grad = None

    def reset(self) -> None:
        """Do nothing: Horovod was restarted, and `sync` joins it, because Horovod catches its errors there."""
        self._joined = False

    def sync(self) -> bool:
        """Join the current ranks before anything is loaded."""
        if not self._joined:
            left = self._comm
            shutdown()
            init("horovod", deadline=left.deadline, checksums=left.checksums)
            self._member.rejoin()
            self._joined = True
        found = super().sync()
        if not found and self._comm.elastic:
            self.save()  # so that there is a commit to return to from the first step on
        return found

    def check_host_updates(self) -> None:
        """Check as Horovod does, but commit everything, and synchronise every rank even if ranks only left."""
        from horovod.common.exceptions import HostsUpdatedInterrupt

        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            self.save()
            raise HostsUpdatedInterrupt(skip_sync=False) from None
