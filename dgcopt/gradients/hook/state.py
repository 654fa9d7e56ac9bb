"""The state of a `ddp_hook` on one rank, which DDP keeps and the user saves: see `dgcopt.gradients.hook`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from ...comm import Comm
from ...compressors import Compressor
from ...exchange.commit import CommitMarker
from ...exchange.runner import Runner
from ...exchange.telemetry import Telemetry
from ..introspection import backward_pass, uncounted_parameters
from .memory import HookMemory
from .settings import HookSettings
from .step import HookStep

if TYPE_CHECKING or torch.distributed.is_available():
    from torch.distributed import GradBucket
else:
    GradBucket = Any

__all__ = ["HookState"]


class HookState:
    """The compressor of a `ddp_hook`, its memory, and the exchanges of the step, on one rank.

    It can be pickled (`torch.save`). To resume, pass the restored state to `ddp_hook` with the optimizer, and register
    the result. On the same rank of the same world size training continues with the same bits. Until DDP has rebuilt its
    buckets, results that depend on their layout may differ: last bits of an allreduce among more than two ranks, and
    coordinates that owners forward (`reduce="owner"`) or that have room in a message of Rice codes.

    Attributes:
        telemetry: bytes and seconds of this process.
    """

    def __init__(self, compressor: Compressor | Any = None) -> None:
        self._settings = HookSettings(compressor)
        self._memory = HookMemory(self._settings)
        self.telemetry = Telemetry()
        self._lock = threading.RLock()
        self._marker = CommitMarker()
        self._pass = -1
        """Number of the backward pass."""
        self._arrived: set[Tensor] = set()
        """Parameters whose buckets have arrived in it."""
        self._expected: set[Tensor] = set()
        """Parameters of a backward pass without a marked last bucket; empty if the last one is marked."""

    @property
    def compressor(self) -> Compressor:
        """The compressor of the gradients."""
        return self._settings.compressor

    @property
    def step(self) -> int:
        """Number of committed steps."""
        return self._memory.step

    @property
    def comm(self) -> Comm:
        """The wire: given, or that of `dgcopt.init()`, joined when it is first needed."""
        return self._runner.comm

    @functools.cached_property
    def _runner(self) -> Runner:
        runner = Runner(self._settings.join(self), "ddp_hook", lambda: None, lambda: self._step.fail())
        runner.scheduler.count_in(self.telemetry)
        return runner

    @functools.cached_property
    def _step(self) -> HookStep:
        return HookStep(self._settings, self._memory, self._runner.scheduler, self._marker)

    # -- persistence -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of this rank's memory, in plain tensors and numbers."""
        comm = self._settings.known_comm
        if comm is not None:
            self._marker.check(comm.rank)
        return self._memory.state(comm)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`, between steps. The next backward pass checks that it belongs here."""
        self._memory.restore(state)
        self._marker.end()

    def __getstate__(self) -> dict[str, Any]:
        return {"compressor": self.compressor, **self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        HookState.__init__(self, state["compressor"])
        self.load_state_dict(state)

    # -- settings ----------------------------------------------------------------------------------------------------

    def attach(self, optimizer: Optimizer) -> None:
        """Let the compressor take over its part of the optimizer's step, before the first backward pass.

        Replaces an earlier optimizer of the same parameters. Of a wrapper by Accelerate, Lightning or Fabric it uses
        the inner optimizer, which they step.
        """
        self._settings.attach(optimizer, lambda: self.comm.size == 1, lambda: self._memory.averaged)

    def use(
        self, names: dict[Tensor, str] | None, comm: Comm | None, scaler: Any, may_differ: Sequence[str] = ()
    ) -> None:
        """Set the parameters' names, the wire, the loop's GradScaler and the settings that may differ, where given."""
        self._settings.use(names, comm, scaler, may_differ)

    # -- during backward ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def exchange(self, bucket: GradBucket) -> Future[Tensor]:
        """Take one of DDP's buckets; the call for the last one finishes the step. Its averaged gradients come later."""
        with self._lock:  # autograd runs a thread for each device
            return self._exchange(bucket)

    def _exchange(self, bucket: GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        self._memory.check_rank(self.comm)
        if self.comm.size == 1:
            future.set_result(buffer)
            return future
        try:
            is_last = self._begin(bucket)
            self._step.add(bucket, future)
        except BaseException:
            self._step.fail()
            raise
        if is_last:
            self._runner.finish(self._step.run)
        return future

    def _begin(self, bucket: GradBucket) -> bool:
        """Start a step with the first bucket of a backward pass; return True for the last one."""
        params, is_first, this_pass = bucket.parameters(), bucket.index() == 0, backward_pass()
        is_uncounted = is_first and self._step.is_under_way and this_pass == self._pass
        if is_first and not is_uncounted:
            self._step.start()
            self._pass, self._arrived, self._expected = this_pass, set(), set()
        elif is_uncounted and not self._expected:
            self._expected = uncounted_parameters(self, params)
        self._arrived.update(params)
        return self._expected <= self._arrived if self._expected else bucket.is_last()
