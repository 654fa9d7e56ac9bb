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

from ..comm import Comm, current_comm
from ..compressors import NoCompression
from ..errors import ConfigError
from ..exchange.parameters import check_optimizer, given_names, unique_names
from ..flat.local_shard import is_sharded
from ..gradients.replicas import check_on_mesh, comm_of_replicas
from .replica import Replica
from .rounds import Rounds
from .rule import Rule
from .sync import Round, Sync

__all__ = ["Averaging"]

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


class Averaging(Rule):
    """An algorithm that averages weights every few steps. Instances hold settings; two ways to use them:

        optimizer = dgcopt.LocalSGD(torch.optim.SGD(...), every=8)  # returns the optimizer, now averaged
        averaging = dgcopt.LocalSGD(every=8)  # settings, as from a config file,
        optimizer = averaging.attach(torch.optim.SGD(...))  # for a later optimizer

    Both take `named_parameters`, also as the argument after the optimizer, `comm` and `mesh` like
    `DistributedOptimizer`. The optimizer gains the attribute `averaging`, the `Rounds` of this rank, and its
    `state_dict()` contains their state. All ranks must start from the same weights (`broadcast_parameters`); the first
    step checks it.
    """

    def __new__(cls, *args: Any, **settings: Any) -> Any:
        """Return the settings; or, if the first argument is an optimizer, that optimizer with averaging attached."""
        if not args or not (isinstance(args[0], Optimizer | nn.Module) or hasattr(args[0], "param_groups")):
            return super().__new__(cls)
        check_optimizer(args[0])
        optimizer, *own = args
        where = {name: settings.pop(name) for name in ("named_parameters", "comm", "mesh") if name in settings}
        if own and isinstance(own[0], Iterable) and not isinstance(own[0], str):  # no setting of any rule comes first
            where = {"named_parameters": own.pop(0), **where}
        return cls(*own, **settings).attach(optimizer, **where)

    def attach(
        self,
        optimizer: AnyOptimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        comm: Comm | None = None,
        mesh: Any = None,
    ) -> AnyOptimizer:
        """Average the weights of `optimizer`, and return it. This object is copied.

        For parameters that `fully_shard` has sharded, `mesh` is the dimension of the device mesh over which the model
        is replicated: each rank averages its shards within it. Raises ConfigError for an optimizer that is averaged
        already, and for parameters without a name or of a dtype that cannot be averaged; MismatchError if ranks differ
        in parameters or settings.
        """
        check_optimizer(optimizer)
        given = given_names(named_parameters) or {}
        names = unique_names(optimizer, given)
        if mesh is not None or any(map(is_sharded, names)):
            comm = self._among_replicas(current_comm(comm), names, mesh)
        rule = copy.deepcopy(self)
        rule.rounds(Replica(rule, optimizer, given), comm)
        return optimizer

    def _among_replicas(self, comm: Comm, names: dict[Tensor, str], mesh: Any) -> Comm:
        """Return the comm over which this rank's shards are averaged."""
        check_on_mesh(names, mesh)
        if not self.meets:
            raise ConfigError(
                f"{type(self).__name__} waits for some peers only, so ranks that hold shards of one replica cannot "
                f"agree on a round. Average sharded parameters by LocalSGD, SlowMo or DiLoCo"
            )
        compression = getattr(self, "compression", None) or NoCompression()
        if any(each.clips_model for each in compression.parts()):
            raise ConfigError(
                f"LocalClip(per='model') in {compression!r} clips the norm of a rank's outer gradient, and each rank "
                f"has shards of it: clip per='tensor'"
            )
        return comm_of_replicas(comm, names, compression, mesh, across=False)

    def rounds(self, replica: Replica, comm: Comm | None) -> Rounds:
        """Return the object that runs this algorithm for the weights of one optimizer on one rank."""
        return Rounds(self.sync, replica, comm)

    def sync(self, round: Round) -> Sync:
        """Return one rank's part in a round: by default the exchange of each bucket."""
        return Sync(round)
