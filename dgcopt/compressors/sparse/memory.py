"""DGC's memory: the residual, momentum correction, and local gradient clipping.

Symbols follow Lin et al., "Deep Gradient Compression" (ICLR 2018): u is the local momentum, v the residual, the sum of
unsent momentum.
"""

import functools
import itertools
import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ...errors import ConfigError
from ...errors.checks import check_positive
from ...flat.buckets import Segment
from ...flat.gradient import LocalGradient
from ...flat.local_shard import as_dtensor, as_stepped, local
from ...flat.memory import at_least_float32
from ...kernels import (
    BLOCK,
    Momentum,
    accumulate,
    decay,
    is_dense,
    norm_of,
    preview_block_maxima,
    preview_blocks,
    update_momentum,
)
from ..context import Context
from ..own_step import steps_as
from .schedule import ScheduledRatio

__all__ = ["ErrorFeedback", "LocalClip", "MomentumCorrected", "MomentumCorrection"]

log = logging.getLogger("dgcopt")

Pair: TypeAlias = tuple[Tensor, Tensor]
"""Current memory, and its next value if the step commits."""


_STARTED: Mapping[str, Any] = {"momentum_started": True}
"""The optimizer state of a parameter after its first gradient."""


def _rule_of(group: dict[str, Any], state: Mapping[str, Any]) -> Momentum:
    """Return the momentum rule of a parameter group, given one parameter's `state`.

    torch's SGD does not dampen the first gradient.
    """
    dampening = float(group["dampening"])
    if dampening and not {"momentum_started", "momentum_buffer"} & state.keys():
        dampening = 0.0
    return Momentum(float(group["momentum"]), dampening, bool(group["nesterov"]))


def _sign_of(group: dict[str, Any]) -> int:
    """Return the sign of SGD's momentum buffer, which with `maximize` adds up negative gradients."""
    return -1 if group["maximize"] else 1


@dataclass(frozen=True)
class Run:
    """Neighbouring segments, from `start` to `stop`, with the same momentum rule; None without momentum."""

    start: int
    stop: int
    rule: Momentum | None

    @property
    def span(self) -> slice:
        """The run in elements."""
        return slice(self.start, self.stop)

    @property
    def blocks(self) -> slice:
        """The run in blocks."""
        return slice(self.start // BLOCK, -(-self.stop // BLOCK))


class ErrorFeedback:
    """Plain error feedback, v <- v + g: unsent coordinates are sent later."""

    residual_content: str = ""
    """Content of v if it is not plain gradients or updates; see `Compressor.residual_content`."""

    def start(self, ctx: Context) -> Callable[[Segment], Tensor | None] | None:
        """Return a function from a parameter's segment to its initial u, None for zero; None without momentum."""
        return None

    def runs(self, segments: Sequence[Segment]) -> list[Run]:
        """Group neighbouring segments with the same rule for this step into runs."""
        return [Run(segments[0].start, segments[-1].stop, None)]

    def accumulate(self, grad: LocalGradient, v: Tensor, u: Tensor | None, runs: Sequence[Run]) -> Tensor:
        """Update v and u in one pass and clear the gradient; return the block maxima of v."""
        maxima = self._pass(accumulate, grad, v, u, runs)
        grad.mark_clear()
        return maxima

    def preview_block_maxima(
        self, grad: LocalGradient, v: Tensor, u: Tensor | None, runs: Sequence[Run], new: Tensor | None = None
    ) -> Tensor:
        """Return the block maxima that `accumulate` will return; write its v to `new`, if given, and nothing else."""
        return self._pass(preview_block_maxima, grad, v, u, runs, new)

    def update_momentum(self, grad: LocalGradient, u: Tensor | None, runs: Sequence[Run]) -> None:
        """Finish `accumulate` after `preview_block_maxima` has written v: update u and clear the gradient."""
        with_momentum = [run for run in runs if run.rule is not None and run.rule.momentum]
        for run in with_momentum:
            assert u is not None and run.rule is not None
            update_momentum(u[run.span], grad.within(run.start, run.stop), run.rule, grad.scale)
        if len(with_momentum) == len(runs):
            grad.mark_clear()

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

    def preview_blocks(
        self, grad: LocalGradient, v: Tensor, u: Tensor | None, runs: Sequence[Run], blocks: Tensor | None = None
    ) -> Tensor:
        """Return the v that `accumulate` will write, or some blocks of it in ascending order: `[blocks, 64]`."""
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
                preview_blocks(v[span], None if u is None else u[span], g, mine, rows[first:last], run.rule, grad.scale)
        return rows

    def correct(self, grad: Tensor, u: Pair | None, runs: Sequence[Run]) -> None:
        """Replace the flat gradient by the term that `accumulate` would add to v, and write the new u."""
        for run in runs:
            if run.rule is not None:
                assert u is not None
                g, old, new = (flat[run.start : run.stop] for flat in (grad, *u))
                if run.rule.momentum == 0:  # torch's SGD keeps its buffer and applies the gradient directly
                    new.copy_(old)
                else:
                    run.rule.of(g, old, out=new)
                    g.copy_(torch.add(g, new, alpha=run.rule.momentum) if run.rule.nesterov else new)

    def before_step(self) -> None:
        """Do nothing: the wrapped optimizer makes its own update."""

    def after_step(self) -> None:
        """Do nothing: no settings were changed."""

    def return_momentum(self, momenta: Mapping[Tensor, Tensor]) -> None:
        """Do nothing: no momentum was taken over."""


class MomentumCorrection(ErrorFeedback):
    """Momentum before sparsification (section 3.2): u <- m u + g, v <- v + u; with Nesterov, v <- v + g + m u.

    Takes over momentum, dampening, Nesterov and weight decay from the wrapped `torch.optim.SGD`, which then only
    subtracts lr times the averaged gradient. Settings are read from the parameter groups at each step, since schedulers
    change them. The weight-decay term is equal on all ranks and is never sent; its own momentum is "decay_momentum" in
    the optimizer's state. By linearity the sum of both parts is SGD's update.
    """

    residual_content = "gradients with momentum"

    def __init__(self, optimizer: SGD) -> None:
        self.optimizer = optimizer
        self._set_aside: list[tuple[dict[str, Any], Any, Any]] = []

    def runs(self, segments: Sequence[Segment]) -> list[Run]:
        if len(self.optimizer.param_groups) == 1:
            rule = _rule_of(self.optimizer.param_groups[0], _STARTED)
            if not rule.dampening:
                return [Run(segments[0].start, segments[-1].stop, rule)]
        rule_in: dict[int, tuple[dict[str, Any], Momentum]] = {}
        for group in self.optimizer.param_groups:
            rule = _rule_of(group, _STARTED)
            rule_in |= {id(param): (group, rule) for param in group["params"]}

        def rule_of(segment: Segment) -> Momentum:
            param = as_stepped(segment.param)
            group, rule = rule_in[id(param)]
            return _rule_of(group, self.optimizer.state.get(param, {})) if rule.dampening else rule

        members = [(rule, list(run)) for rule, run in itertools.groupby(segments, rule_of)]
        return [Run(run[0].start, run[-1].stop, rule) for rule, run in members]

    def before_step(self) -> None:
        """Subtract the weight-decay term, and set SGD's momentum and weight decay to zero for its next step."""
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
        """Restore the settings of the parameter groups."""
        while self._set_aside:
            group, group["momentum"], group["weight_decay"] = self._set_aside.pop()

    @torch.no_grad()
    def _decay(self, group: dict[str, Any], rule: Momentum) -> None:
        """Apply weight decay through its own momentum buffer b.

        b <- m b + (1 - dampening) wd w, w <- w - lr b; with Nesterov w <- w - lr (wd w + m b).
        """
        weight_decay, lr = float(group["weight_decay"]), float(group["lr"])
        alike: dict[tuple[torch.device, torch.dtype, bool], list[Pair]] = {}
        for param in group["params"]:
            if weight_decay == 0 and not rule.dampening and not self.optimizer.state.get(param):
                continue
            if param.grad is None or param.grad.is_sparse:
                continue
            state = self.optimizer.state[param]
            has_started = bool({"momentum_started", "momentum_buffer"} & state.keys())
            if state.pop("momentum_buffer", None) is not None or rule.dampening:  # u has taken over the buffer
                state["momentum_started"] = True
            b = state.get("decay_momentum")
            if b is None and weight_decay == 0:
                continue
            if b is None and has_started:
                b = state["decay_momentum"] = torch.zeros_like(param)
            if b is None:
                b = state["decay_momentum"] = param.detach() * weight_decay
                param.add_(b * rule.momentum + b if rule.nesterov else b, alpha=-lr)
                continue
            w, b = local(param.detach()), local(b)
            flat = is_dense(w) and b.stride() == w.stride()
            if flat and not w.is_contiguous():
                w, b = (x.as_strided((x.numel(),), (1,)) for x in (w, b))
            alike.setdefault((w.device, w.dtype, flat), []).append((w, b))
        for pairs in alike.values():  # in one pass if they are flat
            weights, buffers = zip(*pairs, strict=True)
            decay(weights, buffers, rule, weight_decay, lr)

    @torch.no_grad()
    def _add_momentum_of_rows(self, group: dict[str, Any], rule: Momentum) -> None:
        """Apply SGD's momentum to sparse gradients, which arrive unselected and have no u, in SGD's own buffer."""
        sign = _sign_of(group)
        for param in group["params"]:
            grad = param.grad
            if grad is None or not grad.is_sparse:
                continue
            state = self.optimizer.state[param]
            buffer = state.get("momentum_buffer")
            if buffer is None:
                buffer = state["momentum_buffer"] = grad * sign
            else:
                buffer.mul_(rule.momentum).add_(grad, alpha=sign * (1 - rule.dampening))
            param.grad = grad.add(buffer, alpha=sign * rule.momentum) if rule.nesterov else buffer * sign

    @torch.no_grad()
    def return_momentum(self, momenta: Mapping[Tensor, Tensor]) -> None:
        """Return u and the momentum of weight decay to SGD's buffer, for steps without an exchange."""
        signs = self._signs()
        for param, u in momenta.items():
            state = self.optimizer.state[as_stepped(param)]
            u, decayed = as_dtensor(u.to(param.dtype), param), state.pop("decay_momentum", None)
            u = u * signs[as_stepped(param)]
            state["momentum_buffer"] = u if decayed is None else u + decayed

    def start(self, ctx: Context) -> Callable[[Segment], Tensor | None]:
        """Return a function from a segment to its initial u: this rank's part of SGD's momentum buffer."""
        signs, share = functools.cache(self._signs), ctx.divisor / ctx.size / ctx.place.gain

        def start(segment: Segment) -> Tensor | None:
            param = as_stepped(segment.param)
            buffer = self.optimizer.state.get(param, {}).get("momentum_buffer")
            if buffer is None:
                return None
            buffer = local(buffer)  # whose rows are sparse if gradients were
            return (buffer.to_dense() if buffer.is_sparse else buffer) * (signs()[param] * share)

        return start

    def _signs(self) -> dict[Tensor, int]:
        """Return the sign of each parameter's momentum buffer."""
        groups = self.optimizer.param_groups
        return {param: _sign_of(group) for group in groups for param in group["params"]}


def _memory_for(optimizer: Optimizer, params: AbstractSet[Tensor]) -> ErrorFeedback:
    """Return momentum correction if SGD has momentum for any of `params`, else plain error feedback, and log which."""
    groups = [group for group in optimizer.param_groups if params & {*group["params"]}]
    has_momentum = any(group.get("momentum") for group in groups)
    if has_momentum and isinstance(optimizer, SGD) and steps_as(optimizer, SGD):
        return MomentumCorrection(optimizer)
    log.info(
        "dgcopt: %s has no classical momentum to correct; unsent gradient is kept by plain error feedback",
        type(optimizer).__name__,
    )
    return ErrorFeedback()


class MomentumCorrected(ScheduledRatio):
    """A compressor that takes over the momentum of a wrapped SGD if it sends gradients, else keeps error feedback.

    Decided before the first exchange, not in `attach`: schedulers that are made in between may set momentum.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._memory_of: Callable[[], ErrorFeedback] = ErrorFeedback

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memory_of": ErrorFeedback}  # a copy attaches to its own optimizer

    def attach(self, optimizer: Optimizer) -> None:
        super().attach(optimizer)
        self._take_over(optimizer)

    def _take_over(self, optimizer: Optimizer) -> None:
        params = {param for group in optimizer.param_groups for param in group["params"]}
        own = functools.cache(functools.partial(_memory_for, optimizer, params))
        self._memory_of = own if self.sends == "gradient" else ErrorFeedback

    @property
    def _memory(self) -> ErrorFeedback:
        return self._memory_of()

    def residual_content(self, kind: Hashable) -> str:
        return self._memory.residual_content or super().residual_content(kind)

    def before_step(self, optimizer: Optimizer) -> None:
        self._memory.before_step()

    def after_step(self, optimizer: Optimizer) -> None:
        self._memory.after_step()

    def return_momentum(self, momenta: Mapping[Tensor, Tensor]) -> None:
        self._memory.return_momentum(momenta)


@dataclass
class LocalClip:
    """Clip each rank's own gradient before it is accumulated (section 3.3, "Local Gradient Clipping").

    `per="model"` clips the norm over all parameters; of sharded ones over all shards of the rank's replica, whose ranks
    add up their squares in an allreduce of 8 bytes. `max_norm` is the threshold T for the averaged gradient; it is
    scaled to the local one. If the N local gradients are independent with norm s, their
    mean has norm s / sqrt(N); so |mean| = T where |g| = s = T sqrt(N). The paper divides local gradients by N before
    adding them up, which turns this into its T N^(-1/2); undivided gradients that are averaged afterwards need
    T N^(+1/2), and undivided gradients that are summed T N^(-1/2). Needs every gradient of the step before the
    first exchange, so nothing overlaps with backward.

    `per="tensor"` clips each parameter's gradient by `max_norm`, unscaled.

    Instead of `max_norm`, `value` clips each element's magnitude, or `fn` clips one parameter's gradient, which may be
    flat, in place or by returning the result.

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
        """Return the threshold for the local gradient of one of `size` ranks."""
        assert self.max_norm is not None
        return self.max_norm * (math.sqrt(size) if op == "average" else 1 / math.sqrt(size))

    def clip_model(
        self,
        grads: Sequence[Tensor],
        size: int,
        op: Literal["average", "sum"],
        norm: Tensor | None = None,
        share: float = 1.0,
    ) -> None:
        """Scale all of `grads` in place so that their common norm is at most the local threshold.

        `norm` is that norm where `grads` are only shards; None to compute it. `grads` are `share` times those to clip.
        """
        if norm is None:
            norms = [_norm_of(grad) for grad in grads]
            norm = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device, torch.float64) for n in norms]))
        for grad in grads:
            _clip(grad, norm.to(grad.device), share * self.local_threshold(size, op))

    def clip_each(self, grads: Sequence[Tensor], share: float = 1.0) -> None:
        """Clip each parameter's gradient in place; `grads` are `share` times those to clip."""
        for grad in grads:
            if share != 1:
                grad.div_(share)
            if self.max_norm is not None:
                _clip(grad, _norm_of(grad), self.max_norm)
            elif self.value is not None:
                most = min(self.value, torch.finfo(grad.dtype).max)
                grad.clamp_(-most, most)
            elif self.fn is not None and (clipped := self.fn(grad)) is not None:
                grad.copy_(clipped)
            if share != 1:
                grad.mul_(share)


def _norm_of(grad: Tensor) -> Tensor:
    """Return the Euclidean norm; in float64 if squares exceed float32, on a GPU always, as knowing it would wait."""
    norm = norm_of(grad) if grad.is_cpu else None
    return torch.linalg.vector_norm(grad, dtype=torch.float64) if norm is None or norm.isinf() else norm


def _clip(grad: Tensor, norm: Tensor, threshold: float) -> None:
    """Scale `grad` in place by threshold / norm, if below 1; in float32, as a float16 factor may be zero."""
    scale = (threshold / (norm + 1e-6)).clamp(max=1.0)
    wide = at_least_float32(grad.dtype)
    torch.mul(grad.to(wide), scale.to(wide), out=grad)
