"""Horovod's names over any wire: `import dgcopt.hvd as hvd` in place of `import horovod.torch as hvd`.

The script then runs under horovodrun as before, and under torchrun, mpirun, srun or alone too. Its own collectives
never mix with gradients in flight. Unlike in Horovod, collectives are matched by their order, so all ranks must start
them in the same one, and compare names, shapes, dtypes, operations and roots first; `_async` ones wait for
that, too, while Horovod does it in a thread of its own: see docs/migration.md. Objects are not pickled, so they must
have types that `dgcopt.broadcast_object` takes. `hvd.elastic` is Horovod's own. Access to a missing name is an error
that names its replacement.

Before `hvd.init()`, all of these but DistributedOptimizer and the `_built` functions raise ConfigError, a ValueError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from ..comm import horovod_torch, wire_in_use
from ..errors import CommError
from ..exchange import broadcast as start_alike
from ..exchange.divergence import OnDivergence
from ..gradients import optimizer as distributed
from . import operations, world
from .compression import Compression
from .operations import *  # noqa: F403
from .variants import poll, synchronize
from .world import *  # noqa: F403
from .world import ProcessSet, comm_of, global_process_set, is_initialized, size

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "poll",
    "synchronize",
]
__all__ += operations.__all__
__all__ += world.__all__

HorovodInternalError = CommError
"""Raised by a failed collective; over Horovod it is Horovod's own, too."""

_TIMELINE = "profile with torch.profiler, or with HOROVOD_TIMELINE under horovodrun; optimizer.telemetry has the sums"
_INSTEAD = {
    "join": "wrap the loop in `with dgcopt.join(optimizer):`, which serves the ranks that have more data on every wire",
    "SyncBatchNorm": "use torch.nn.SyncBatchNorm on the wire torch, or horovod.torch.SyncBatchNorm under horovodrun",
    "start_timeline": _TIMELINE,
    "stop_timeline": _TIMELINE,
}


def __getattr__(name: str) -> Any:
    if name == "elastic":
        if is_initialized() and wire_in_use() != "horovod":
            raise AttributeError(
                f"hvd.elastic is Horovod's own, and messages go over {wire_in_use()} here: start the script with "
                f"horovodrun, or use dgcopt.elastic.run and dgcopt.elastic.State, which serve every launcher"
            )
        try:
            return horovod_torch().elastic
        except CommError as error:
            raise AttributeError(
                f"hvd.elastic is Horovod's own ({error}). Under torchrun, which restarts all workers, "
                f"dgcopt.checkpoint.load is enough"
            ) from error
    if name in _INSTEAD:
        raise AttributeError(f"dgcopt.hvd has no {name!r}: {_INSTEAD[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def DistributedOptimizer(
    optimizer: AnyOptimizer, *args: Any, on_divergence: OnDivergence = "warn", **settings: Any
) -> AnyOptimizer:
    """Wrap an optimizer as `dgcopt.DistributedOptimizer` does; but diverging ranks train on, as with Horovod.

    Ranks that start from other weights, optimizer state or settings, and that change them apart, are a warning in the
    log of every rank. `on_divergence="raise"` makes it an error, the default of `dgcopt.DistributedOptimizer`.
    """
    return distributed.DistributedOptimizer(optimizer, *args, on_divergence=on_divergence, **settings)


# -- starting alike --------------------------------------------------------------------------------------------------


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int = 0) -> None:
    """Overwrite tensors with rank `root_rank`'s: a `state_dict()`, `named_parameters()` or a list of parameters."""
    comm = comm_of(global_process_set)
    given: Any = params
    if isinstance(params, Iterable) and not isinstance(params, Mapping | str | nn.Module):
        given = [value if isinstance(value, tuple) else (str(place), value) for place, value in enumerate(params)]
    start_alike.broadcast_parameters(given, global_process_set.place_of(root_rank), comm)


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int = 0, model: Any = None) -> None:
    """Load rank `root_rank`'s optimizer state; `model`, which Horovod needs for sparse parameters, is unused."""
    comm = comm_of(global_process_set)
    start_alike.broadcast_optimizer_state(optimizer, global_process_set.place_of(root_rank), comm)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return rank `root_rank`'s object on every rank; see `dgcopt.broadcast_object` for the types allowed."""
    comm = comm_of(process_set)
    return start_alike.broadcast_object(obj, process_set.place_of(root_rank), comm)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return every rank's object in a list by rank, of the types that `broadcast_object` takes."""
    return [broadcast_object(obj, root) for root in range(size())]
