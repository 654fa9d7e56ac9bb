"""What was not sent: the residual, momentum correction and factor masking, and local gradient clipping.

The symbols are those of Lin et al., "Deep Gradient Compression" (ICLR 2018): u is the local momentum, v the local
accumulation of what has not been sent yet.
"""

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ..checks import check_positive
from ..errors import ConfigError
from ..flat.gradient import LocalGradient
from ..flat.segments import Segment
from ..kernels import BLOCK, Momentum, accumulate, ahead, decay, look, move_on
from .own_step import steps_as

__all__ = ["ErrorFeedback", "LocalClip", "MomentumCorrection", "memory_for"]

log = logging.getLogger("dgcopt")

Pair: TypeAlias = tuple[Tensor, Tensor]
"""Memory as it is, and as it will be if the step succeeds."""


_STARTED: Mapping[str, Any] = {"momentum_started": True}
"""The state of a parameter that has had its first gradient."""


def _rule_of(group: dict[str, Any], state: Mapping[str, Any]) -> Momentum:
    """A parameter group's, or of one parameter in its `state`: torch's SGD does not dampen the first gradient."""
    dampening = float(group["dampening"])
    if dampening and not {"momentum_started", "momentum_buffer"} & state.keys():
        dampening = 0.0
    return Momentum(float(group["momentum"]), dampening, bool(group["nesterov"]))


@dataclass(frozen=True)
class Run:
    """Neighbouring segments, from `start` to `stop`, whose momentum is treated alike; by no rule if there is none."""

    start: int
    stop: int
    rule: Momentum | None

    @property
    def span(self) -> slice:
        """Where it lies."""
        return slice(self.start, self.stop)

    @property
    def blocks(self) -> slice:
        """In blocks."""
        return slice(self.start // BLOCK, -(-self.stop // BLOCK))


class ErrorFeedback:
    """v <- v + g: what is not sent now is sent later."""

    start: Callable[[Segment], Tensor | None] | None = None
    """What a parameter's u starts from, if not from zero; None where there is no u."""

    holds_back: str = ""
    """What v consists of, if not of what travels as it is; see `Compressor.holds_back`."""

    def runs(self, segments: Sequence[Segment]) -> list[Run]:
        """How the segments' memory is to change in this step: neighbours that change alike in one run."""
        return [Run(segments[0].start, segments[-1].stop, None)]

    def accumulate(self, grad: LocalGradient, v: Tensor, u: Tensor | None, runs: Sequence[Run]) -> Tensor:
        """Make v and u the new ones in one pass, and the gradient zero; returns the block maxima of v."""
        maxima = self._pass(accumulate, grad, v, u, runs)
        grad.is_clear = True
        return maxima

    def look(
        self, grad: LocalGradient, v: Tensor, u: Tensor | None, runs: Sequence[Run], new: Tensor | None = None
    ) -> Tensor:
        """The block maxima that `accumulate` will give, and in `new`, if given, its v; all else stays as it is."""
        return self._pass(look, grad, v, u, runs, new)

    def move_on(self, grad: LocalGradient, u: Tensor | None, runs: Sequence[Run]) -> None:
        """What is left of `accumulate` where `look` has written v: make u the new one, and the gradient zero."""
        moved = [run for run in runs if run.rule is not None and run.rule.momentum]
        for run in moved:
            assert u is not None and run.rule is not None
            move_on(u[run.span], grad.within(run.start, run.stop), run.rule, grad.scale)
        grad.is_clear = len(moved) == len(runs)

    def _pass(
        self,
        kernel: Callable[..., None],
        grad: LocalGradient,
        v: Tensor,
        u: Tensor | None,
        runs: Sequence[Run],
        new: Tensor | None = None,
    ) -> Tensor:
        maxima = torch.empty(len(v) // BLOCK, dtype=v.dtype, device=v.device)
        for run in runs:
            span, blocks = run.span, run.blocks
            g = grad.within(run.start, run.stop)
            beside = () if new is None else (new[span],)
            kernel(v[span], None if u is None else u[span], g, maxima[blocks], run.rule, grad.scale, *beside)
        return maxima

    def ahead(
        self, grad: LocalGradient, v: Tensor, u: Tensor | None, runs: Sequence[Run], blocks: Tensor | None = None
    ) -> Tensor:
        """What `accumulate` will make of v, or of some blocks of it, in ascending order: `[blocks, 64]`."""
        if blocks is None:
            blocks = torch.arange(len(v) // BLOCK, device=v.device)
        rows = torch.empty(len(blocks), BLOCK, dtype=v.dtype, device=v.device)
        cuts = [(0, len(blocks))]
        if len(runs) > 1:
            ends = torch.tensor([[run.blocks.start, run.blocks.stop] for run in runs], device=v.device)
            cuts = torch.searchsorted(blocks, ends).tolist()  # waits for a device
        for run, (first, last) in zip(runs, cuts, strict=True):
            if first < last:
                span, mine = run.span, blocks[first:last] - run.blocks.start
                g = grad.within(run.start, run.stop)
                ahead(v[span], None if u is None else u[span], g, mine, rows[first:last], run.rule, grad.scale)
        return rows

    def correct(self, grad: Tensor, u: Pair | None, runs: Sequence[Run]) -> None:
        """Make the flat gradient what `accumulate` would add to v, and write the new u."""
        for run in runs:
            if run.rule is not None:
                assert u is not None
                g, old, new = (flat[run.start : run.stop] for flat in (grad, *u))
                if run.rule.momentum == 0:  # torch's SGD leaves its buffer alone, and applies the gradient itself
                    new.copy_(old)
                else:
                    run.rule.of(g, old, out=new)
                    g.copy_(torch.add(g, new, alpha=run.rule.momentum) if run.rule.nesterov else new)

    def before_step(self) -> None:
        """Nothing to take over: the wrapped optimizer does all of its own update."""

    def after_step(self) -> None:
        """Nothing to give back."""

    def give_back(self, momenta: Mapping[Tensor, Tensor]) -> None:
        """Nothing was taken over."""


class MomentumCorrection(ErrorFeedback):
    """Momentum before sparsification (section 3.2): u <- m u + g, v <- v + u; with Nesterov, v <- v + g + m u.

    Takes momentum, dampening, Nesterov and weight decay over from the wrapped `torch.optim.SGD`, which then only
    subtracts lr times what arrives. Both are read from the parameter groups at each step, as schedulers change them.
    The weight-decay term never travels, being equal on all ranks: it has a momentum of its own, kept in the
    optimizer's state as "decay_momentum". By linearity the sum of both parts is what SGD would have applied.
    """

    holds_back = "gradients with momentum"

    def __init__(self, optimizer: SGD) -> None:
        self.optimizer = optimizer
        self._set_aside: list[tuple[dict[str, Any], Any, Any]] = []

    def runs(self, segments: Sequence[Segment]) -> list[Run]:
        rule_in: dict[int, tuple[dict[str, Any], Momentum]] = {}
        for group in self.optimizer.param_groups:
            rule = _rule_of(group, _STARTED)
            rule_in |= {id(param): (group, rule) for param in group["params"]}

        def rule_of(segment: Segment) -> Momentum:
            group, rule = rule_in[id(segment.param)]
            return _rule_of(group, self.optimizer.state.get(segment.param, {})) if rule.dampening else rule

        members = [(rule, list(run)) for rule, run in itertools.groupby(segments, rule_of)]
        return [Run(run[0].start, run[-1].stop, rule) for rule, run in members]

    def before_step(self) -> None:
        """Subtract the weight-decay term and make SGD's own momentum and weight decay zero for its next step."""
        self.after_step()
        for group in self.optimizer.param_groups:
            rule = _rule_of(group, _STARTED)
            if rule.momentum == 0:
                continue
            self._decay(group, rule)
            self._add_momentum_of_rows(group, rule)
            self._set_aside.append((group, group["momentum"], group["weight_decay"]))
            group["momentum"], group["weight_decay"] = 0.0, 0.0

    def after_step(self) -> None:
        """Give the parameter groups their settings back."""
        while self._set_aside:
            group, group["momentum"], group["weight_decay"] = self._set_aside.pop()

    @torch.no_grad()
    def _decay(self, group: dict[str, Any], rule: Momentum) -> None:
        """b <- m b + (1 - dampening) wd w, w <- w - lr b; with Nesterov w <- w - lr (wd w + m b)."""
        weight_decay, lr = float(group["weight_decay"]), float(group["lr"])
        for param in group["params"]:
            if param.grad is None or param.grad.is_sparse:
                continue
            state = self.optimizer.state[param]
            if state.pop("momentum_buffer", None) is not None or rule.dampening:  # u has taken it over
                state["momentum_started"] = True
            b = state.get("decay_momentum")
            if b is None and weight_decay == 0:
                continue
            if b is None:
                b = state["decay_momentum"] = param.detach() * weight_decay
                param.add_(b * rule.momentum + b if rule.nesterov else b, alpha=-lr)
                continue
            w = param.detach()
            if w.is_contiguous() and b.is_contiguous():
                w, b = w.view(-1), b.view(-1)  # in one pass, which takes them flat
            decay(w, b, rule, weight_decay, lr)

    @torch.no_grad()
    def _add_momentum_of_rows(self, group: dict[str, Any], rule: Momentum) -> None:
        """Sparse gradients arrive whole and have no u: do for them what torch's SGD would, in its own buffer."""
        for param in group["params"]:
            grad = param.grad
            if grad is None or not grad.is_sparse:
                continue
            state = self.optimizer.state[param]
            buffer = state.get("momentum_buffer")
            if buffer is None:
                buffer = state["momentum_buffer"] = grad.clone()
            else:
                buffer.mul_(rule.momentum).add_(grad, alpha=1 - rule.dampening)
            param.grad = grad.add(buffer, alpha=rule.momentum) if rule.nesterov else buffer.clone()

    @torch.no_grad()
    def give_back(self, momenta: Mapping[Tensor, Tensor]) -> None:
        """u becomes SGD's own momentum again, for steps without an exchange, and that of weight decay with it."""
        for param, u in momenta.items():
            state = self.optimizer.state[param]
            u, decayed = u.to(param.dtype), state.pop("decay_momentum", None)
            state["momentum_buffer"] = u if decayed is None else u + decayed

    def start(self, segment: Segment) -> Tensor | None:
        """SGD's own momentum buffer of a parameter, from steps before it was wrapped: what u starts from."""
        return self.optimizer.state.get(segment.param, {}).get("momentum_buffer")


def memory_for(optimizer: Optimizer) -> ErrorFeedback:
    """Momentum correction for SGD with momentum, plain error feedback for everything else; says which in the log."""
    has_momentum = any(group.get("momentum") for group in optimizer.param_groups)
    if has_momentum and isinstance(optimizer, SGD) and steps_as(optimizer, SGD):
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

    In place of `max_norm`, each parameter's gradient is clipped to magnitudes of at most `value`, or by `fn`: it is
    called with one parameter's gradient, which may be flat, and clips it in place or returns the clipped one.

    Raises ConfigError unless exactly one of the three is given, and for numbers that are not positive.
    """

    max_norm: float | None = None
    per: Literal["model", "tensor"] = "model"
    value: float | None = None
    fn: Callable[[Tensor], Tensor | None] | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("max_norm", "value", "fn") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(f"LocalClip takes one of max_norm, value and fn, not {' and '.join(given) or 'none'}")
        if self.fn is None:
            check_positive(getattr(self, given[0]), given[0])
        elif not callable(self.fn):
            raise ConfigError(f"fn must be a function of a parameter's gradient, not {self.fn!r}")
        if self.max_norm is None:
            self.per = "tensor"
        if self.per not in ("model", "tensor"):
            raise ConfigError(f'LocalClip clips per "model" or per "tensor", not per {self.per!r}')

    def local_threshold(self, size: int, op: Literal["average", "sum"]) -> float:
        """The threshold for one rank's gradient among `size`."""
        assert self.max_norm is not None
        return self.max_norm * (math.sqrt(size) if op == "average" else 1 / math.sqrt(size))

    def clip_model(self, grads: Sequence[Tensor], size: int, op: Literal["average", "sum"]) -> None:
        """Scale all of `grads` in place so that their common norm is at most the local threshold."""
        norms = [torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
        norm = torch.linalg.vector_norm(torch.stack([n.to(norms[0]) for n in norms]))
        scale = (self.local_threshold(size, op) / (norm + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(scale.to(grad.device, grad.dtype))

    def clip_each(self, grads: Sequence[Tensor]) -> None:
        """Clip each of `grads`, one parameter's each, in place."""
        for grad in grads:
            if self.max_norm is not None:
                grad.mul_((self.max_norm / (torch.linalg.vector_norm(grad) + 1e-6)).clamp(max=1.0))
            elif self.value is not None:
                grad.clamp_(-self.value, self.value)
            elif self.fn is not None and (clipped := self.fn(grad)) is not None:
                grad.copy_(clipped)
