"""Training that continues when ranks die: a restarted rank receives its state from a live one.

    dgcopt.init(survive=True)
    optimizer = dgcopt.DistributedOptimizer(torch.optim.SGD(...), model.named_parameters(), dgcopt.DGC())
    state = dgcopt.survive.State(model=model, optimizer=optimizer, scheduler=scheduler, step=0)
    state.sync()
    for state.step in range(state.step, 10_000):
        ...

started by `dgcopt run --survive -np 4 train.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from .comm import Comm, current_comm
from .errors import ConfigError
from .exchange.broadcast import broadcast_object
from .exchange.held import held
from .flat.optimizer_state import STATE_KEY, unmarked

__all__ = ["State", "complete"]

Result = TypeVar("Result")


def complete(act: Callable[[], Result], *, comm: Comm | None = None) -> Result:
    """Call a function of collectives, such as a checkpoint or a mean loss, on every rank between two steps.

        dgcopt.survive.complete(lambda: dgcopt.checkpoint.save(directory, state, step))

    If a rank is lost meanwhile, the others call it again, until all that are left have completed it. Collectives
    elsewhere than here and in `step()` raise CommError then. Without `dgcopt.init(survive=True)` it is called once.
    """
    return current_comm(comm).complete(act)


class State:
    """The state that a rank needs to join the others in the middle of training.

    Args:
        model: parameters and buffers.
        optimizer: as `dgcopt.DistributedOptimizer` or an averaging algorithm returned it, or a sequence of such
            optimizers.
        values: become attributes. Tensors, numbers, text, None, and dicts, lists and tuples of them; and objects with
            `state_dict()` and `load_state_dict()`, such as schedulers, but not samplers. A rank gives them as they are
            at the first gradient of a step, or, where weights are averaged, at the first local step after a round,
            before the step.

    A restarted rank has a residual of zero: its old one was lost with its process.
    """

    def __init__(self, *, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], **values: Any) -> None:
        self._optimizers = [optimizer] if isinstance(optimizer, Optimizer) else [*optimizer]
        if not isinstance(model, nn.Module) or not all(isinstance(one, Optimizer) for one in self._optimizers):
            raise ConfigError("dgcopt.survive.State needs the model, and the optimizer or a sequence of optimizers")
        if taken := sorted(set(values) & {"model", "optimizer", "sync"}):
            raise ConfigError(f"dgcopt.survive.State has {taken[0]!r} itself. Give that value another name.")
        self.model = model
        self.optimizer = optimizer
        self._parts = {name: value for name, value in values.items() if hasattr(value, "load_state_dict")}
        self._names = [name for name in values if name not in self._parts]
        for name, value in values.items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Load rank 0's state before the first step; in a restarted process, the state of a live rank.

        Every rank calls it once, before its first step. From then on this rank sends its state to restarted ranks.
        Raises QuorumLost if the training ranks do not admit this process before the deadline, and ConfigError if it
        cannot load their state.
        """
        comm: Any = current_comm()
        if comm.survives:
            comm.give_state_by(self._transfer)
        if comm.survives and comm.is_pending:
            comm.come_back(self._transfer)
        else:
            comm.complete(lambda: self._transfer(comm))

    def _transfer(self, comm: Comm) -> None:
        """Load the state of rank 0 of a comm on its other ranks."""
        own: Any = None
        try:
            own = self._own() if comm.rank == 0 else None
        except Exception as error:  # of any kind, in code of the user's: the other ranks wait for this one's answer
            own = ConfigError(f"state_dict() of a value in dgcopt.survive.State raises {type(error).__name__}: {error}")
        sent = broadcast_object(own, comm=comm)
        if comm.rank == 0:
            return
        try:
            self._load(sent)
        except RuntimeError as error:  # a wire takes those for a lost connection, and tries again
            raise ConfigError(
                f"this process cannot load the state of a live rank: {error}. Start all ranks with the same script and "
                f"model, and leave values out of the State that differ over ranks, such as a sampler"
            ) from error

    @property
    def _averaging(self) -> list[Any]:
        """The `Rounds` of each optimizer; None if its weights are not averaged."""
        return [held(one).averaging for one in self._optimizers]

    def _own(self) -> dict[str, Any]:
        return {
            "model": dict(self.model.state_dict()),
            "optimizers": [_without_memory(one.state_dict()) for one in self._optimizers],
            "averaging": [None if one is None else one.give_state() for one in self._averaging],
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
            "values": {name: getattr(self, name) for name in self._names},
        }

    def _load(self, sent: dict[str, Any]) -> None:
        late = [one for one in self._averaging if one is not None and one.has_begun]
        if late:  # in the same process, which keeps its weights, step and the state of its optimizers
            for averaging, given in zip(self._averaging, sent["averaging"], strict=True):
                if averaging in late and given is not None:
                    averaging.take_state(given)
            return
        self.model.load_state_dict(sent["model"])
        for optimizer, state in zip(self._optimizers, sent["optimizers"], strict=True):
            mine, kept = optimizer.state_dict().get(STATE_KEY), state.pop(STATE_KEY)
            if mine is not None and kept is not None:
                state[STATE_KEY] = {**mine, **kept, "memory": {}}
            optimizer.load_state_dict(state)
        for averaging, given in zip(self._averaging, sent["averaging"], strict=True):
            if given is not None:
                averaging.take_state(given)
        for name, part in self._parts.items():
            part.load_state_dict(sent["parts"][name])
        for name, value in sent["values"].items():
            setattr(self, name, value)


def _without_memory(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state without its rank's residual."""
    kept = state.get(STATE_KEY)
    return {
        "state": state["state"],
        "param_groups": [unmarked(group) for group in state["param_groups"]],
        STATE_KEY: None if kept is None else {key: kept[key] for key in ("step", "order", "shared")},
    }
