"""What every averaging algorithm is: an exchange of weights, written as a generator of collectives, and its schedule.

Ranks train by themselves, each with its own optimizer, and bring their weights together now and then. A new algorithm
is a subclass that says when (`due`) and how (`exchange`).
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..collectives import Exchange
from ..comm import Comm
from ..exchange.parameters import check_optimizer
from .sync import Sync, WeightSync
from .weights import Weights

if TYPE_CHECKING:
    from .rounds import Rounds

__all__ = ["Averaging"]


class Averaging:
    """How ranks that train by themselves stay together. Instances hold settings, and work in either of two ways:

        optimizer = dgcopt.LocalSGD(torch.optim.SGD(...), every=8)  # the very optimizer, from now on averaged
        averaging = dgcopt.LocalSGD(every=8)  # settings, as from a config file,
        optimizer = averaging.attach(torch.optim.SGD(...))  # for an optimizer that comes later

    Both take `named_parameters` and `comm` as `DistributedOptimizer` does. The optimizer gains an attribute
    `averaging`, the `Rounds` of this rank, and its `state_dict()` what they keep. All ranks must start from the same
    weights (`broadcast_parameters`), which is checked at the first step.
    """

    warmup_steps: int = 0
    """So many steps first in which gradients are averaged, by a DistributedOptimizer around the wrapped one.

    The last of them sends all that a compressor has held back. A step that all skip (NaN, Inf) is none of them.
    """

    overlap: bool = False
    """Whether an exchange goes on during the next forward and backward pass, to end before the next update."""

    meets: bool = True
    """Whether all ranks meet in every exchange, so that they can vote on it; else each waits for its peers only."""

    in_turn: bool = False
    """True if ranks take different numbers of rounds, so that one bucket's exchange must end before the next one's."""

    prepares: bool = False
    """Whether `before_step` is to be asked before each local step."""

    by_bucket: bool = True
    """Whether all that it does is to `exchange` each bucket, after local steps, so that SlowMo can build on it."""

    def __new__(cls, *args: Any, **settings: Any) -> Any:
        """The settings; or around an optimizer, if that is the first argument, the optimizer."""
        if not args or not (isinstance(args[0], Optimizer | nn.Module) or hasattr(args[0], "param_groups")):
            return super().__new__(cls)
        check_optimizer(args[0])
        where = {name: settings.pop(name) for name in ("named_parameters", "comm") if name in settings}
        return cls(*args[1:], **settings).attach(args[0], **where)

    def attach(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        comm: Comm | None = None,
    ) -> Optimizer:
        """Average the weights of `optimizer`, which is returned; this object is copied.

        Raises ConfigError for an optimizer that is averaged already, and for parameters without a name or that cannot
        be averaged; MismatchError if ranks differ in parameters or settings.
        """
        check_optimizer(optimizer)
        copy.deepcopy(self).rounds(optimizer, named_parameters, comm)
        return optimizer

    def rounds(
        self, optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None, comm: Comm | None
    ) -> Rounds:
        """What hooks this algorithm into an optimizer on one rank, to be its `averaging`."""
        from .rounds import Rounds

        return Rounds(self, optimizer, named_parameters, comm)

    def sync(self, rounds: Rounds) -> Sync:
        """What one rank does in a round: to `exchange` each bucket, unless the algorithm says otherwise."""
        return WeightSync(rounds)

    def __repr__(self) -> str:
        """The settings, alike on all ranks that have the same: they are compared when an optimizer is wrapped."""
        settings = [f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_")]
        return f"{type(self).__name__}({', '.join(settings)})"

    def check(self, comm: Comm, names: Sequence[str]) -> None:
        """Raises ConfigError if the algorithm does not go with the ranks that there are, or the parameters' names."""

    def set_steps_per_epoch(self, steps: int) -> None:
        """Tell schedules that count epochs how many local steps one has."""

    def kind(self, name: str, param: Tensor) -> Hashable:
        """Parameters of different kinds never share a bucket."""
        return None

    def due(self, step: int) -> bool:
        """Whether ranks exchange weights once they have made `step` local steps."""
        raise NotImplementedError(f"{type(self).__name__} must define due()")

    def start(self, x: Tensor, ctx: Weights) -> None:
        """Before the first local step, and after state was loaded: see the weights that it is made from."""

    def before_step(self, x: Tensor, ctx: Weights) -> None:
        """Right before each local step, if `prepares`: see the weights that it is made from."""

    def exchange(self, x: Tensor, ctx: Weights) -> Exchange:
        """Exchange one bucket: yields collectives, returns the new weights.

        `x` is a flat copy of this rank's weights, may be overwritten and returned.
        """
        raise NotImplementedError(f"{type(self).__name__} must define exchange()")

    def identical(self, step: int) -> bool:
        """Whether all ranks hold the same weights after the exchange that follows step `step`."""
        return False

    def reaches_all(self, step: int) -> bool:
        """Whether the exchange that follows step `step` takes what a rank has learned to all others, one that has run
        out of data too: until one does, it counts with those that have some (`dgcopt.join`)."""
        return True

    def saved(self, ctx: Weights) -> dict[str, Tensor]:
        """Flat tensors that a checkpoint needs beyond `ctx.memory`; `start` finds them there when it is loaded."""
        return {}

    def merges(self, kind: str) -> bool:
        """Whether, when the number of ranks changes, all take over the mean of a kind of memory that there was."""
        return True
