"""Profile of a user's training script, which runs unchanged until its optimizer has taken some steps.

Hooks of torch.optim tell when a step begins and ends, hooks of the parameters when gradients are ready. Both serve a
bare optimizer, one behind DistributedDataParallel, and a DistributedOptimizer alike.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..errors import ConfigError
from ..flat.local_shard import is_sharded
from . import clock
from .profile import GradientMarks, Profile

__all__ = ["STEPS", "run_script"]

STEPS = 10
"""Steps of a script, those of the warm-up included."""
WARMUP = 3
"""Steps that are not timed: memory is allocated, and DistributedDataParallel rebuilds its buckets."""

Result = TypeVar("Result")


class _Stopped(BaseException):
    """Ends the script after its last step. Not an Exception, which a script may handle."""


class _Steps(Generic[Result]):
    """Times the steps of the only optimizer of a script, and stops the script after the last one.

    A step is timed from the end of the one before to its last gradient, so that a wait for other ranks is left out.

    Args:
        steps: how many.
        then: called with the profile and the parameters' device after the last step, while the ranks are still joined.
    """

    def __init__(self, steps: int, then: Callable[[Profile, torch.device], Result]) -> None:
        self.taken = 0
        self.results: list[Result] = []
        self.error: Exception | None = None
        self._steps, self._then = steps, then
        self._optimizer: Optimizer | None = None
        self._stepping: Optimizer | None = None
        self._named: dict[str, Tensor] = {}
        self._marks: GradientMarks | None = None
        self._start: Any = None
        self._timed: list[dict[str, float]] = []

    @property
    def is_over(self) -> bool:
        """True if the script is stopped."""
        return bool(self.results) or self.error is not None

    @property
    def _device(self) -> torch.device:
        return next(iter(self._named.values())).device

    def before(self, optimizer: Optimizer, *_: Any) -> None:
        """Hook before a step of any optimizer."""
        if self.is_over:  # the script has caught what should have ended it
            raise _Stopped
        if self._stepping is not None:  # a step within a step: of an inner optimizer, or of one that `then` makes
            return
        if self._optimizer is None:
            self._watch(optimizer)
        if optimizer is not self._optimizer:
            self._fail(
                f"the script steps two optimizers, {type(self._optimizer).__name__} and {type(optimizer).__name__}: "
                f"dgcopt doctor measures one. Give a script that trains one of the models"
            )
        self._stepping = optimizer

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        """Hook after a step of any optimizer."""
        if optimizer is not self._stepping:
            return
        assert self._marks is not None
        self.taken += 1
        if self.taken > WARMUP and (ready := self._marks.since(self._start)):
            self._timed.append(ready)
        if self.taken == self._steps:
            self._finish()
        self._marks.clear()
        self._stepping, self._start = None, clock.mark(self._device)

    def _watch(self, optimizer: Optimizer) -> None:
        """Watch the gradients of the first optimizer that steps."""
        self._optimizer = optimizer
        params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
        if any(map(is_sharded, params)):
            self._fail("the script trains sharded parameters: dgcopt doctor predicts steps of replicated ones only")
        self._named = {f"parameter {place}": param for place, param in enumerate(params)}
        if not self._named:
            self._fail(f"the script's {type(optimizer).__name__} has no parameter to train")
        self._marks = GradientMarks(self._named, self._device)

    def _finish(self) -> None:
        """Hand over the profile of the fastest step, and stop the script."""
        self.remove()
        if not self._timed:
            self._fail("no gradient arrived between two steps of the script's optimizer: nothing to exchange")
        ready = min(self._timed, key=lambda one: max(one.values()))
        seconds = max(ready.values())
        profile = Profile(
            {name: tuple(param.shape) for name, param in self._named.items()},
            {name: ready.get(name, seconds) for name in self._named},
            seconds,
        )
        try:
            with torch.enable_grad():
                self.results.append(self._then(profile, self._device))
        except Exception as error:  # raised once the script has ended, which might handle it here
            self.error = error
        raise _Stopped

    def _fail(self, words: str) -> None:
        self.error = ConfigError(words)
        raise _Stopped

    def remove(self) -> None:
        """Remove the hooks of gradients."""
        if self._marks is not None:
            self._marks.remove()


def run_script(
    path: Path, arguments: Sequence[str], then: Callable[[Profile, torch.device], Result], steps: int = STEPS
) -> Result:
    """Run a script as `python path arguments` would, until its optimizer has taken `steps` steps.

    Args:
        path: the script.
        arguments: its command line.
        then: called with the profile of the fastest step and the parameters' device while the script is still running,
            so that its ranks are still joined. Its result is returned.
        steps: more than 3, which are not timed.

    Raises ConfigError if the script does not exist, ends before, or steps several optimizers; what `then` raises; and
    what the script itself raises.
    """
    if steps <= WARMUP:
        raise ConfigError(f"--steps must be {WARMUP + 1} or more, not {steps}: the first {WARMUP} are not timed")
    if not path.is_file():
        raise ConfigError(f"there is no script {path}")
    timed = _Steps(steps, then)
    status: Any = 0
    hooks = [register_optimizer_step_pre_hook(timed.before), register_optimizer_step_post_hook(timed.after)]
    try:
        with _command_line(path, arguments):
            runpy.run_path(str(path), run_name="__main__")
    except _Stopped:
        pass
    except SystemExit as ended:
        status = ended.code
    finally:
        timed.remove()
        for hook in hooks:
            hook.remove()
    if timed.error is not None:
        raise timed.error
    if not timed.results:
        exited = "ended" if status in (0, None) else f"exited ({status})"
        if not timed.taken:
            raise ConfigError(
                f"{path} {exited} before any optimizer of torch.optim had stepped: give the arguments with which it "
                f"trains behind its name, as in `dgcopt doctor --script {path} --epochs 1`"
            )
        raise ConfigError(
            f"{path} {exited} after {timed.taken} of {steps} steps: let it train longer, or lower --steps (at least "
            f"{WARMUP + 1})"
        )
    return timed.results[0]


@contextmanager
def _command_line(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Context in which this process looks as if the script had been started."""
    argv, modules = sys.argv[:], sys.path[:]
    sys.argv[:], sys.path[:0] = [str(path), *arguments], [str(path.resolve().parent)]
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, modules
