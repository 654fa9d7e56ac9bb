"""What was not sent: the residual, momentum correction and factor masking, and local gradient clipping.

The symbols are those of Lin et al., "Deep Gradient Compression" (ICLR 2018): u is the local momentum, v the local
accumulation of what has not been sent yet.
"""

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from .buckets import Segment
from .errors import ConfigError

__all__ = ["ErrorFeedback", "LocalClip", "MomentumCorrection", "memory_for"]

log = logging.getLogger("dgcopt")


class ErrorFeedback:
    """v <- v + g: what is not sent now is sent later."""

    def correct(self, grad: Tensor, u: tuple[Tensor, Tensor] | None, segments: Sequence[Segment]) -> Tensor:
        """What this step adds to v: the gradient itself."""
        return grad

    needs_momentum = False

    def before_step(self) -> None:
        """Nothing to take over: the wrapped optimizer does all of its own update."""

    def after_step(self) -> None:
        """Nothing to give back."""


@dataclass(frozen=True)
class _Rule:
    """How one SGD parameter group treats its momentum."""

    momentum: float
    dampening: float
    nesterov: bool

    @staticmethod
    def of(group: dict[str, Any]) -> "_Rule":
        return _Rule(float(group["momentum"]), float(group["dampening"]), bool(group["nesterov"]))


class MomentumCorrection(ErrorFeedback):
    """Momentum before sparsification (section 3.2): u <- m u + g, v <- v + u; with Nesterov, v <- v + g + m u.

    Takes momentum, dampening, Nesterov and weight decay over from the wrapped `torch.optim.SGD`, which then only
    subtracts lr times what arrives. Both are read from the parameter groups at each step, as schedulers change them.
    The weight-decay term never travels, being equal on all ranks: it has a momentum of its own, kept in the
    optimizer's state as "decay_momentum". By linearity the sum of both parts is what SGD would have applied.
    """

    needs_momentum = True

    def __init__(self, optimizer: SGD) -> None:
        self.optimizer = optimizer
        self._set_aside: list[tuple[dict[str, Any], Any, Any]] = []

    def correct(self, grad: Tensor, u: tuple[Tensor, Tensor] | None, segments: Sequence[Segment]) -> Tensor:
        """Write the new u from the old one and return what this step adds to v (u itself, or `grad` overwritten)."""
        assert u is not None
        old, new = u
        group_of = {id(param): group for group in self.optimizer.param_groups for param in group["params"]}
        spans = list(_spans(segments, group_of))
        for start, stop, rule, members in spans:
            g, m = grad[start:stop], rule.momentum
            if m == 0:  # torch's SGD leaves its buffer alone, and applies the gradient itself
                new[start:stop] = old[start:stop]
                continue
            part = torch.mul(old[start:stop], m, out=new[start:stop]).add_(g, alpha=1 - rule.dampening)
            for segment in members if rule.dampening else ():
                if not {"momentum_started", "momentum_buffer"} & self.optimizer.state[segment.param].keys():
                    # torch's SGD does not dampen the first gradient
                    new[segment.start : segment.stop] = grad[segment.start : segment.stop]
            if rule.nesterov:
                g.add_(part, alpha=m)
        if all(rule.momentum and not rule.nesterov for _, _, rule, _ in spans):
            return new
        for start, stop, rule, _ in spans:
            if rule.momentum and not rule.nesterov:
                grad[start:stop] = new[start:stop]
        return grad

    def before_step(self) -> None:
        """Subtract the weight-decay term and make SGD's own momentum and weight decay zero for its next step."""
        self.after_step()
        for group in self.optimizer.param_groups:
            rule = _Rule.of(group)
            if rule.momentum == 0:
                continue
            self._decay(group, rule)
            self._set_aside.append((group, group["momentum"], group["weight_decay"]))
            group["momentum"], group["weight_decay"] = 0.0, 0.0

    def after_step(self) -> None:
        """Give the parameter groups their settings back."""
        while self._set_aside:
            group, group["momentum"], group["weight_decay"] = self._set_aside.pop()

    @torch.no_grad()
    def _decay(self, group: dict[str, Any], rule: _Rule) -> None:
        """b <- m b + (1 - dampening) wd w, w <- w - lr b; with Nesterov w <- w - lr (wd w + m b)."""
        weight_decay, lr = float(group["weight_decay"]), float(group["lr"])
        for param in group["params"]:
            if param.grad is None:
                continue
            state = self.optimizer.state[param]
            if state.pop("momentum_buffer", None) is not None or rule.dampening:  # u has taken it over
                state["momentum_started"] = True
            b = state.get("decay_momentum")
            if b is None and weight_decay == 0:
                continue
            if b is None:
                b = state["decay_momentum"] = param.detach() * weight_decay
            else:
                b.mul_(rule.momentum).add_(param, alpha=weight_decay * (1 - rule.dampening))
            if rule.nesterov:
                param.add_(b * rule.momentum + param * weight_decay, alpha=-lr)
            else:
                param.add_(b, alpha=-lr)

    def inherited(self, segment: Segment) -> Tensor | None:
        """SGD's own momentum buffer of a parameter, from steps before it was wrapped: what u starts from."""
        return self.optimizer.state.get(segment.param, {}).get("momentum_buffer")


def _spans(
    segments: Sequence[Segment], group_of: dict[int, dict[str, Any]]
) -> Iterator[tuple[int, int, _Rule, list[Segment]]]:
    """Runs of neighbouring segments that share a rule, as `start, stop, rule, members`."""
    for rule, run in itertools.groupby(segments, lambda segment: _Rule.of(group_of[id(segment.param)])):
        members = list(run)
        yield members[0].start, members[-1].stop, rule, members


def memory_for(optimizer: Optimizer) -> ErrorFeedback:
    """Momentum correction for SGD with momentum, plain error feedback for everything else; says which in the log."""
    if isinstance(optimizer, SGD) and any(group["momentum"] for group in optimizer.param_groups):
        return MomentumCorrection(optimizer)
    log.info(
        "dgcopt: %s has no classical momentum to correct; what is not sent is kept by plain error feedback",
        type(optimizer).__name__,
    )
    return ErrorFeedback()


@dataclass
class LocalClip:
    """Clip each rank's own gradient before it is accumulated (section 3.3, "Local Gradient Clipping").

    `per="model"` clips the norm over all parameters. `max_norm` is the threshold T that one would use on the
    averaged gradient, and is scaled to the local one. If the N local gradients are independent with norm s, their
    mean has norm s / sqrt(N); so |mean| = T where |g| = s = T sqrt(N). The paper divides local gradients by N before
    adding them up, which turns this into its T N^(-1/2); undivided gradients that are averaged afterwards need
    T N^(+1/2), and undivided gradients that are summed T N^(-1/2). Needs every gradient of the step before the
    first exchange, so nothing overlaps with backward.

    `per="tensor"` clips each parameter's gradient by `max_norm` as it is given.

    Raises ConfigError if `max_norm` is not positive.
    """

    max_norm: float
    per: Literal["model", "tensor"] = "model"

    def __post_init__(self) -> None:
        if not self.max_norm > 0 or not math.isfinite(self.max_norm):
            raise ConfigError(f"max_norm must be a positive number, not {self.max_norm!r}")
        if self.per not in ("model", "tensor"):
            raise ConfigError(f'LocalClip clips per "model" or per "tensor", not per {self.per!r}')

    def local_threshold(self, size: int, op: Literal["average", "sum"]) -> float:
        """The threshold for one rank's gradient among `size`."""
        return self.max_norm * (math.sqrt(size) if op == "average" else 1 / math.sqrt(size))

    def clip_model(self, grads: Sequence[Tensor], size: int, op: Literal["average", "sum"]) -> None:
        """Scale all of `grads` in place so that their common norm is at most the local threshold."""
        norms = [torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
        norm = torch.linalg.vector_norm(torch.stack([n.to(norms[0]) for n in norms]))
        scale = (self.local_threshold(size, op) / (norm + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(scale.to(grad.device, grad.dtype))

    def clip_tensors(self, grad: Tensor, segments: Sequence[Segment]) -> None:
        """Scale each segment of `grad` in place so that its norm is at most `max_norm`."""
        for segment in segments:
            part = grad[segment.start : segment.stop]
            part.mul_((self.max_norm / (torch.linalg.vector_norm(part) + 1e-6)).clamp(max=1.0))
