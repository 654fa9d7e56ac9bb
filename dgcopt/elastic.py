"""Continue when workers are lost or come, under Horovod Elastic, without losing what the lost ones held back.

    optimizer = dgcopt.DistributedOptimizer(torch.optim.SGD(...), model.named_parameters(), dgcopt.DGC())
    state = dgcopt.elastic.State("/shared/run1", model=model, optimizer=optimizer, epoch=0, batch=0)

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 90):
            ...
            state.commit()

    train(state)

With Horovod's own TorchState the optimizer rejoins by itself too, but what is committed stays in each worker's memory,
where a residual dies with its worker. Here it is a checkpoint of all ranks in a directory that all machines share,
shared out anew by `dgcopt.checkpoint.load`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from . import checkpoint
from .comm import current_comm, init, shutdown
from .errors import CommError, ConfigError
from .exchange.broadcast import broadcast_object, broadcast_optimizer_state, broadcast_parameters

if TYPE_CHECKING:
    from horovod.common.elastic import State as _HorovodsState
else:
    _HorovodsState = object  # the package can be imported without Horovod

__all__ = ["State"]


def State(directory: str | Path, *, model: nn.Module, optimizer: Optimizer, **values: Any) -> Any:
    """What training goes back to after workers were lost or have come: a `horovod.common.elastic.State`.

    Args:
        directory: where commits go, shared by all machines. If it holds commits, training continues from the newest.
        model: its parameters and buffers; after a loss, each rank takes those of one rank.
        optimizer: as `DistributedOptimizer` or an algorithm of `dgcopt.averaging` returned it, for all ranks.
        values: become attributes and are committed, as rank 0 has them: where training is, and whatever else has to
            be taken back with it. Tensors, numbers, text, None, and dicts, lists and tuples of them.

    Methods that are used, besides those for `hvd.elastic.run`:
        `commit()` writes a checkpoint and then looks for hosts that were added or are to be removed. Collective.
        `check_host_updates()` only looks; if the hosts have changed, it commits before it says so.
        `register_reset_callbacks(callbacks)`: called on every rank, new ones too, whenever a commit has been loaded,
        so that none of them keeps a learning rate that was scaled for another number of ranks.

    As with every Horovod Elastic script, nothing between wrapping the optimizer and `hvd.elastic.run` may be
    collective: workers that come later have nobody to do it with. Parameters need no broadcast: `hvd.elastic.run`
    begins by taking rank 0's. An error in the middle of a step costs what was done since the last commit.

    Give `dgcopt.init(deadline=...)` fewer seconds than the default: a worker that is left may have to wait so long for
    another that has already given up. Horovod 0.28.1 as released sometimes hangs after a worker has died (about
    once in ten times here, inside the call that hands it a tensor); the one that scripts/install_horovod.sh builds does
    not. It aborts if process sets are registered; the groups "node" and
    "across" therefore do not exist under Horovod Elastic.

    With averaging, training continues from the mean of all ranks' weights at the commit, those of lost ranks too; it is
    taken right before the first step. `AsyncAverage` cannot be used.

    Raises ConfigError for an optimizer that is not distributed, or only over some ranks, and for values named like a
    method; CommError if Horovod is not installed.
    """
    return _class()(directory, model, optimizer, values)


@functools.cache
def _class() -> type[_State]:
    """`_State` as a subclass of Horovod's, which is imported no earlier than it is needed."""
    try:
        from horovod.common.elastic import State as base
    except ImportError as error:
        raise CommError(
            f"dgcopt.elastic.State is for Horovod Elastic, but Horovod cannot be imported ({error}); "
            f"scripts/install_horovod.sh installs it"
        ) from error
    return type("State", (_State, base), {"__module__": __name__, "__doc__": State.__doc__})


class _State(_HorovodsState):
    """What differs from Horovod's base class, which listens for changes of hosts."""

    def __init__(self, directory: str | Path, model: nn.Module, optimizer: Any, values: dict[str, Any]) -> None:
        member = getattr(optimizer, "averaging", optimizer)
        if not hasattr(member, "rejoin"):
            raise ConfigError(
                "dgcopt.elastic.State needs the optimizer that DistributedOptimizer, or an algorithm of "
                "dgcopt.averaging, returned"
            )
        joined = member.comm.wire == "horovod"
        if joined and {member.comm, getattr(optimizer, "comm", member.comm)} != {current_comm()}:
            raise ConfigError("dgcopt.elastic.State needs an optimizer of all ranks: wrap it without process_set")
        super().__init__(bcast_object=broadcast_object, get_rank=lambda: member.comm.rank)
        self.model = model
        self.optimizer = optimizer
        self._member = member  # of the current world
        self._directory = directory
        self._names = list(values)
        self._commits = 0
        self._joined = joined
        self._after_loading: list[Callable[[], None]] = []
        if taken := [name for name in values if hasattr(self, name)]:
            raise ConfigError(f"dgcopt.elastic.State has {taken[0]!r} itself: give that value another name")
        self._set(values)

    def save(self) -> None:
        """Write the next checkpoint; `commit()` is the one to call."""
        values = self._values_of_rank_0()
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "values": values}
        checkpoint.save(self._directory, state, self._commits + 1)
        self._commits += 1

    def restore(self) -> None:
        """Drop the gradients of the step that failed; the rest is for `sync`, when it is known who is left."""
        for param in self.model.parameters():
            param.grad = None

    def reset(self) -> None:
        """Horovod was restarted. `sync` joins it, because Horovod catches its errors there."""
        self._joined = False

    def sync(self) -> None:
        """Join the current ranks and load the newest commit; without one, take rank 0's state."""
        if not self._joined:
            left = self._member.comm
            shutdown()
            init("horovod", deadline=left.deadline, checksums=left.checksums)
            self._member.rejoin()
            self._joined = True
        found = checkpoint.load(self._directory)
        if found is None:
            broadcast_parameters(self.model.state_dict())
            broadcast_optimizer_state(self.optimizer)
            self._set(self._values_of_rank_0())
            self._commits = 0
            self.save()  # so that there is a commit to return to from the first step on
            return
        self._commits, state = found
        self.model.load_state_dict(state["model"])
        # a single rank commits no memory, and what was held back since must not stay
        nothing = checkpoint.kept_by(self._member.comm.rank, self._member.comm.size)
        self.optimizer.load_state_dict({checkpoint.STATE_KEY: nothing} | state["optimizer"])
        self._set(state["values"])
        for callback in self._after_loading:
            callback()

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """As Horovod's, but run after the commit is loaded, which would undo what they change."""
        self._after_loading.extend(callbacks)

    def check_host_updates(self) -> None:
        """As Horovod's, but everything is committed, and every rank synchronises even if ranks only left."""
        from horovod.common.exceptions import HostsUpdatedInterrupt

        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            self.save()
            raise HostsUpdatedInterrupt(skip_sync=False) from None

    def _values_of_rank_0(self) -> dict[str, Any]:
        return broadcast_object({name: getattr(self, name) for name in self._names})

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)
