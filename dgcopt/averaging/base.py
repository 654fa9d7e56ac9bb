"""The base class of averaging algorithms: a rule, and the way to attach it to an optimizer.

Ranks train independently, each with its own optimizer, and average weights in rounds. A new algorithm is a subclass
that defines its schedule (`due`) and its exchange (`exchange`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from ..comm import Comm
from ..exchange.parameters import check_optimizer
from .rounds import Rounds
from .rule import Rule
from .sync import Round, Sync, WeightSync

__all__ = ["Averaging"]

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


class Averaging(Rule):
    """An algorithm that averages weights every few steps. Instances hold settings; two ways to use them:

        optimizer = dgcopt.LocalSGD(torch.optim.SGD(...), every=8)  # returns the optimizer, now averaged
        averaging = dgcopt.LocalSGD(every=8)  # settings, as from a config file,
        optimizer = averaging.attach(torch.optim.SGD(...))  # for a later optimizer

    Both take `named_parameters`, also as the argument after the optimizer, and `comm` like `DistributedOptimizer`. The
    optimizer gains the attribute `averaging`, the `Rounds` of this rank, and its `state_dict()` contains their state.
    All ranks must start from the same weights (`broadcast_parameters`); the first step checks it.
    """

    def __new__(cls, *args: Any, **settings: Any) -> Any:
        """Return the settings; or, if the first argument is an optimizer, that optimizer with averaging attached."""
        if not args or not (isinstance(args[0], Optimizer | nn.Module) or hasattr(args[0], "param_groups")):
            return super().__new__(cls)
        check_optimizer(args[0])
        optimizer, *own = args
        where = {name: settings.pop(name) for name in ("named_parameters", "comm") if name in settings}
        if own and isinstance(own[0], Iterable) and not isinstance(own[0], str):  # no setting of any rule comes first
            where = {"named_parameters": own.pop(0), **where}
        return cls(*own, **settings).attach(optimizer, **where)

    def attach(
        self,
        optimizer: AnyOptimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        comm: Comm | None = None,
    ) -> AnyOptimizer:
        """Average the weights of `optimizer`, and return it. This object is copied.

        Raises ConfigError for an optimizer that is averaged already, and for parameters without a name or of a dtype
        that cannot be averaged; MismatchError if ranks differ in parameters or settings.
        """
        check_optimizer(optimizer)
        copy.deepcopy(self).rounds(optimizer, named_parameters, comm)
        return optimizer

    def rounds(
        self, optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None, comm: Comm | None
    ) -> Rounds:
        """Return the object that runs this algorithm for one optimizer on one rank."""
        return Rounds(self, self.sync, optimizer, named_parameters, comm)

    def sync(self, round: Round) -> Sync:
        """Return one rank's part in a round: by default the exchange of each bucket."""
        return WeightSync(round)
