"""The exchange of dgcopt in a model that a framework has wrapped in DistributedDataParallel.

DDP's own averaging is turned off by a communication hook that leaves gradients as they are. The optimizer exchanges
them, or weights, as it does without a framework. Frameworks write rank 0's state only: each rank's part is a checkpoint
of dgcopt beside the framework's own.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .. import (
    Averaging,
    CheckpointError,
    Comm,
    Compressor,
    ConfigError,
    DistributedOptimizer,
    broadcast_object,
    checkpoint,
)
from ..comm import current_comm
from ..exchange.held import held
from ..exchange.parameters import inner_optimizer
from ..flat.optimizer_state import STATE_KEY, entries_in, kept_by, unmarked

__all__ = ["Exchange", "check_method", "keep_gradients_local", "read"]

log = logging.getLogger("dgcopt")

Parts = dict[str, Any]
"""This rank's part of a checkpoint."""


_local: WeakSet[DistributedDataParallel] = WeakSet()
"""Models whose averaging is turned off."""


def keep_gradients_local(model: nn.Module) -> nn.Module:
    """Turn off the averaging of the DistributedDataParallel in `model`, and return the module that DDP has wrapped.

    Raises ConfigError if several ranks train a model that is not wrapped in DDP, and for a DDP whose gradients are
    views of its own buckets.
    """
    wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if not wrapped:
        if current_comm().size > 1:
            raise ConfigError(
                f"{type(model).__name__} is not wrapped in DistributedDataParallel, and {current_comm().size} ranks "
                f"train it: let the framework use DDP, or, for sharded parameters, dgcopt.DistributedOptimizer itself"
            )
        return model
    if wrapped[0].gradient_as_bucket_view:  # DDP's views would point to results, past its buckets
        raise ConfigError(
            "DistributedDataParallel has gradient_as_bucket_view=True, and dgcopt writes its results into gradients, "
            "not into DDP's buckets: set gradient_as_bucket_view=False"
        )
    if wrapped[0] not in _local:  # a model that is trained again keeps its hook
        wrapped[0].register_comm_hook(None, _as_it_is)
        _local.add(wrapped[0])
    inner: nn.Module = wrapped[0].module
    return inner


# torch compares the annotations of a hook with the types, and this file postpones them
def _as_it_is(state, bucket):  # type: ignore[no-untyped-def]
    buffer = bucket.buffer()
    future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future


def check_method(method: Compressor | Averaging) -> Compressor | Averaging:
    """Return `method`. Raises ConfigError for anything but a compressor or an averaging algorithm."""
    if not isinstance(method, Compressor | Averaging):
        raise ConfigError(
            f"method must be a compressor, such as dgcopt.DGC(0.01), or an averaging algorithm, such as "
            f"dgcopt.LocalSGD(every=8), not {method!r:.200}"
        )
    return method


def read(folder: str | Path) -> Parts:
    """Return this rank's part of a checkpoint that `Exchange.save` wrote; empty, with a warning, if there is none.

    Collective. Raises CheckpointError for a damaged one.
    """
    found = None if "://" in str(folder) else checkpoint.load(folder)
    if found is None:
        log.warning("dgcopt: there is no %s: training resumes, and each rank's residual starts from zero", folder)
    return found[1] if found else {}


class Exchange:
    """The exchange of a model's gradients or weights, and its checkpoints.

    Args:
        model: the module inside DDP.
        optimizers: those that step it, as the framework wraps them or bare. They are changed in place.
        method: a compressor, or an averaging algorithm. Each optimizer takes a copy.
        find: returns this rank's part for a state that an optimizer is given, as `read` does, or None if the state is
            no checkpoint's; collective. None: only `use` brings one.

    Raises ConfigError for a method of another kind, and what `DistributedOptimizer` raises.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[Any],
        method: Compressor | Averaging,
        find: Callable[[], Parts | None] | None = None,
    ) -> None:
        self.model = model
        self.method = check_method(method)
        self.optimizers: list[Optimizer] = [inner_optimizer(optimizer) for optimizer in optimizers]
        for optimizer in self.optimizers:
            # a framework may have loaded rank 0's state before, and this rank's part comes later
            optimizer.param_groups[:] = map(unmarked, optimizer.param_groups)
            own = {param for group in optimizer.param_groups for param in group["params"]}
            named = [(name, param) for name, param in model.named_parameters() if param in own]
            if isinstance(method, Averaging):
                method.attach(optimizer, named)
            else:
                DistributedOptimizer(optimizer, named, method)
            optimizer.register_load_state_dict_pre_hook(self._own_state, prepend=True)
            optimizer.register_state_dict_post_hook(self._mark)
        self._run = secrets.token_hex(8)
        self._loaded: Parts = {}
        self._find = find

    @property
    def comm(self) -> Comm:
        """The wire."""
        return current_comm()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path, step: int) -> None:
        """Write every rank's part into `folder`, which is emptied first; collective.

        Raises CheckpointError, on all ranks, as `dgcopt.checkpoint.save` does.
        """
        if "://" in str(folder):
            log.warning(
                "dgcopt: %s is no local path, so only the framework's checkpoint is written: training that resumes "
                "from it starts with residuals of zero",
                folder,
            )
            return
        if self.comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        self._run = broadcast_object(self._run, comm=self.comm)  # rank 0's is in the framework's files
        state: dict[str, Any] = {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "weights_of_rank_0": broadcast_object(self._digest(), comm=self.comm),
        }
        if isinstance(self.method, Averaging):
            state["model"] = self.model.state_dict()
        checkpoint.save(folder, state, step, keep=1)

    def use(self, parts: Parts) -> None:
        """Let each optimizer's next `load_state_dict` load this rank's part, in place of the state that it is given.

        A compressor leaves out parts that averaging has saved, with a warning: weights and momenta in them differ
        between ranks.
        """
        if "model" in parts and not isinstance(self.method, Averaging):
            log.warning(
                "dgcopt: the ranks' parts are of an averaging algorithm, and %s needs equal replicas: training resumes "
                "from the weights and the optimizer's state of rank 0",
                type(self.method).__name__,
            )
            parts = {}
        states = itertools.chain(parts.get("optimizers", ()), itertools.repeat(None))
        self._loaded = {**parts, "optimizers": dict(zip(self.optimizers, states, strict=False))}

    def check(self, parts: Parts, folder: str | Path) -> None:
        """Raise CheckpointError if parts read from `folder` were not saved with the weights that the model has now."""
        if parts["weights_of_rank_0"] != self._digest():
            raise CheckpointError(
                f"{folder} belongs to other weights than those that training resumes from: give the folder of the "
                f"checkpoint that was loaded, resume=..., or delete {folder}"
            )

    def resume(self, parts: Parts) -> None:
        """Load this rank's part; without one, start with the optimizers' state as it is and nothing unsent.

        Raises CheckpointError without a part for averaging that has begun: its anchors are of other weights.
        """
        self.use(parts)
        if None in self._loaded["optimizers"].values():
            if isinstance(self.method, Averaging):
                raise self._has_trained()
            nothing = {STATE_KEY: kept_by(self.comm.rank, self.comm.size)}
            self.use({"optimizers": [{**optimizer.state_dict(), **nothing} for optimizer in self.optimizers]})
        for optimizer, own in [*self._loaded["optimizers"].items()]:
            optimizer.load_state_dict(own)

    def load_weights(self) -> None:
        """Give this rank its own weights, where an averaging algorithm lets ranks differ."""
        if "model" in self._loaded:
            self.model.load_state_dict(self._loaded["model"])

    def _mark(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Note in a state which run saves it; a post-hook of `state_dict()`."""
        for _, entry in entries_in(state_dict):
            entry["run"] = self._run

    def _own_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Replace the state of rank 0, which a framework loads, by this rank's."""
        if self._find is not None and not self._loaded.get("optimizers"):
            found = self._find()
            if found is not None:
                self.use(found)
        expected = self._loaded.get("optimizers", {})
        if optimizer not in expected:
            return None
        own: dict[str, Any] | None = expected.pop(optimizer)
        if own is not None and not _saved_at(own):  # of a single process, whose state the framework has as well
            return None
        if own is not None and _saved_at(own) == _saved_at(state_dict):
            self.load_weights()
            return own
        if own is not None:  # the framework's files were written again, and the parts were not
            log.warning(
                "dgcopt: the ranks' parts are of another checkpoint than the optimizer's state: training resumes "
                "without them, and each rank's residual starts from zero"
            )
            self._loaded = {"optimizers": dict.fromkeys(expected)}
        averaged = {key for key, value in state_dict.items() if isinstance(value, dict) and STATE_KEY in value}
        if not averaged or {self.comm.size, *(entry["world_size"] for _, entry in entries_in(state_dict))} == {1}:
            return None
        if isinstance(self.method, Averaging) and held(optimizer).averaging.has_begun:
            raise self._has_trained()
        return {key: state_dict[key] for key in state_dict.keys() - averaged}  # rank 0's memory fits no other rank

    def _has_trained(self) -> CheckpointError:
        return CheckpointError(
            f"this optimizer has trained with {type(self.method).__name__}, and the checkpoint has no ranks' parts to "
            f"put in place of its memory: resume with a new model and optimizer"
        )

    def _digest(self) -> str:
        digest = hashlib.sha256()
        with torch.no_grad():
            for param in self.model.parameters():
                whole = param.detach().cpu().contiguous()  # one element is by any strides
                digest.update(whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def _saved_at(state: dict[str, Any]) -> list[tuple[int, str | None]]:
    """Return the steps and runs in which an optimizer's state was saved, by the parts of dgcopt in it."""
    return [(entry["step"], entry.get("run")) for _, entry in entries_in(state)]
