"""The base class of QAdam and 1-bit Adam: Adam with a variance that is frozen after a warm-up."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from ...collectives import AllReduce
from ...errors import ConfigError
from ...errors.checks import is_number
from ...flat.local_shard import as_stepped, local
from ...kernels import Mixture, chunks, is_dense, mix
from ..base import Compressor, GradientExchange
from ..context import Context
from ..own_step import steps_as
from ..wrappers.base import Wrapper

__all__ = ["FrozenAdam"]

log = logging.getLogger("dgcopt")


class FrozenAdam(Wrapper):
    """Adam on dense gradients for T steps; then v is frozen, and `inner` sends each rank's momentum.

    With v and its bias correction from step T, in step k > T with learning rate a and weight decay w:

        m = mean(b1 m + (1 - b1) g);  x = x - a / (1 - b1^k) * m / (sqrt(v / (1 - b2^T)) + eps)

    With a frozen v the step is linear in the gradient, so error feedback works as for SGD. Weight decay follows the
    wrapped optimizer (Adam: g + w x; AdamW: x = (1 - a w) x) and is not sent. Learning rates and betas may change. A
    coordinate with v = 0 has had no gradient yet and does not move.

    Moments and step counts live in the optimizer's own state, so its `state_dict()` holds them. A parameter that is
    added, unfrozen or first used later has its own warm-up, and its bucket is sent dense until that ends. After
    `synchronize()`, `param.grad` is the gradient that leads to the new m, so it can be clipped.

    Args:
        warmup_steps: T, number of first steps with dense gradients. Raise it if the loss jumps afterwards, for example
            with rare gradients: v must have seen all of them.
        inner: compressor of the momentum.

    Costs one allreduce of the gradient for T steps, then the cost of `inner`. Raises ConfigError at wrapping for
    optimizers other than `torch.optim.Adam` and `AdamW`, and for their options amsgrad, maximize, capturable and
    differentiable.
    """

    def __init__(self, warmup_steps: int, inner: Compressor) -> None:
        if not is_number(warmup_steps, Integral) or warmup_steps < 1:
            raise ConfigError(
                f"warmup_steps must be a whole number of at least 1, since v is learned in it, not {warmup_steps!r}"
            )
        self.warmup_steps = int(warmup_steps)
        self._optimizer: Optimizer | None = None
        self._warned = False
        super().__init__(copy.deepcopy(inner))  # it is made to send gradients

    def _follow(self) -> None:
        if self.inner.source != "gradient":
            self.inner.source = "gradient"
        super()._follow()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(warmup_steps={self.warmup_steps}, inner={self.inner!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_optimizer": None}  # a copy attaches to its own optimizer

    def attach(self, optimizer: Optimizer) -> None:
        name = type(self).__name__
        if not steps_as(optimizer, Adam, AdamW):
            raise ConfigError(
                f"{name} replaces Adam's step and needs torch.optim.Adam or AdamW, not {type(optimizer).__name__}. "
                f"Choose another compressor, such as TopK."
            )
        _check_options(name, optimizer)
        self._optimizer = optimizer
        super().attach(optimizer)

    def see_parameters(self, names: Mapping[Tensor, str], others: Iterable[str] = ()) -> None:
        if self._optimizer is not None:
            _check_options(type(self).__name__, self._optimizer)  # of a group that was added
        super().see_parameters(names, others)

    def residual_content(self, kind: object) -> str:
        return "Adam's momentum"

    def as_gradient(self, unsent: Tensor, ctx: Context) -> Tensor:
        unsent, beta1s = self.inner.as_gradient(unsent, ctx), self._beta1s()
        for segment in ctx.segments:
            unsent[segment.start : segment.stop] *= ctx.divisor / ctx.size / (1 - beta1s[as_stepped(segment.param)])
        return unsent

    def in_place(self, kind: object) -> bool:
        return False

    # -- the exchange ------------------------------------------------------------------------------------------------

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        if not self._travels_as_momentum(ctx):
            ctx.memory.keep_unsent()  # unsent momentum stays until momentum is sent again
            return (yield AllReduce(grad, op=ctx.op))
        momenta = self._momenta(ctx)
        if self.inner.mixes and len(momenta) == 1:
            among = replace(ctx.placed(op="average"), mixture=momenta[0])
            return ctx.dense((yield from self.inner.exchange(self._as_mean(grad, ctx), among)))
        self._as_mean(grad, ctx)
        for momentum in momenta:
            mix(grad, momentum)
        gradient = ctx.dense((yield from self.inner.exchange(grad, ctx.placed(op="average"))))
        for momentum in momenta:
            mix(gradient, momentum.inverse)
        return gradient

    def _as_mean(self, grad: Tensor, ctx: Context) -> Tensor:
        """Return the gradient, scaled in place so that the mean over ranks is the result by `Context.op`."""
        return grad if ctx.divisor == ctx.size else grad.mul_(ctx.size / ctx.divisor)

    def _momenta(self, ctx: Context) -> list[Mixture]:
        """Return, for each b1, the momentum from its parameters' gradients; m is zero at first."""
        state_of, beta1s = self._attached.state, self._beta1s()
        found: dict[float, tuple[list[int], list[Tensor]]] = {}
        for segment in ctx.segments:
            param = as_stepped(segment.param)
            state = state_of.get(param)
            starts, momenta = found.setdefault(beta1s[param], ([], []))
            starts.append(segment.start)
            momenta.append(segment.flatten(local(state["exp_avg"]) if state else torch.zeros_like(segment.param)))
        return [Mixture(1 - beta1, beta1, *of) for beta1, of in found.items()]

    def payload_bytes(self, ctx: Context) -> int | None:
        if not self._travels_as_momentum(ctx):
            return ctx.numel * ctx.dtype.itemsize
        return self.inner.payload_bytes(ctx.placed(op="average"))

    @property
    def _attached(self) -> Optimizer:
        if self._optimizer is None:
            raise ConfigError(f"{type(self).__name__} needs the optimizer: call ddp_hook(compressor, optimizer)")
        return self._optimizer

    def _travels_as_momentum(self, ctx: Context) -> bool:
        """Return True if all parameters of the bucket have finished their warm-up.

        One that was never used has not: v would be frozen from its first gradient, which only a dense one is fit for.
        """
        steps = [self._steps(segment.param) for segment in ctx.segments]
        if max(steps) > self.warmup_steps and not min(steps) and not self._warned:
            self._warned = True
            unused = [segment.name for segment, taken in zip(ctx.segments, steps, strict=True) if not taken]
            log.warning(
                "dgcopt: rank %s: parameter(s) %s had no gradient in the warm-up of %s: their bucket is sent dense "
                "until they have had %d. Set requires_grad=False where they are never used",
                *(ctx.rank, ", ".join(map(repr, unused[:4])), type(self).__name__, self.warmup_steps),
            )
        return min(steps) >= self.warmup_steps

    def _steps(self, param: Tensor) -> int:
        return int(self._attached.state.get(as_stepped(param), {}).get("step", 0))

    def _beta1s(self) -> dict[Tensor, float]:
        return {param: group["betas"][0] for group in self._attached.param_groups for param in group["params"]}

    # -- the step ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> Iterable[Tensor]:
        stepped = []
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None and self._is_frozen(param):
                    self._step(param, optimizer.state[param], group)
                    stepped.append(param)
        return stepped

    def after_step(self, optimizer: Optimizer) -> None:
        for state in optimizer.state.values():  # torch.distributed.checkpoint loads no key that is not there
            state.setdefault("frozen_at", 0)
        super().after_step(optimizer)

    def _is_frozen(self, param: Tensor) -> bool:
        return self._steps(param) >= self.warmup_steps

    def _step(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        lr, decay, grad = float(group["lr"]), group["weight_decay"], param.grad
        assert grad is not None
        # kept with v: a run resumed from plain Adam may have made more steps than the warm-up
        frozen_at = state["frozen_at"] = state.get("frozen_at") or int(state["step"])
        state["step"] += 1
        decoupled = group.get("decoupled_weight_decay", isinstance(self._optimizer, AdamW))
        rate = lr / (1 - beta1 ** int(state["step"]))
        for x, g, m, v in _in_chunks(param.detach(), grad, state["exp_avg"], state["exp_avg_sq"]):
            if decay and decoupled:
                x.mul_(1 - lr * decay)
            elif decay:
                g = g.add(x, alpha=decay)
            m.lerp_(g, 1 - beta1)
            spread = (v / (1 - beta2**frozen_at)).sqrt_().add_(group["eps"])
            spread += v.sign().reciprocal_().sub_(1)  # infinite where v is zero: a mask takes three times as long
            x.sub_(torch.div(m, spread, out=spread), alpha=rate)


def _check_options(name: str, optimizer: Optimizer) -> None:
    """Raise ConfigError for options of Adam that a compressor of that name does not step by."""
    for option in ("amsgrad", "maximize", "capturable", "differentiable"):
        if any(group.get(option) for group in optimizer.param_groups):
            raise ConfigError(f"{name} does not support {type(optimizer).__name__}({option}=True): remove {option}")


def _in_chunks(*tensors: Tensor) -> Iterator[Sequence[Tensor]]:
    """Yield tensors of the same shape in parts that fit into a CPU's cache, for several operations in a row."""
    tensors = tuple(map(local, tensors))
    first = tensors[0]
    if all(is_dense(x) and x.stride() == first.stride() for x in tensors):
        flat = [x.detach().as_strided((x.numel(),), (1,)) for x in tensors]
        for span in chunks(0, first.numel(), first.device):
            yield [x[span] for x in flat]
    else:
        yield [x.detach() for x in tensors]
