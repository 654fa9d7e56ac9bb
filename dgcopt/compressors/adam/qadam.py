"""QAdam of Bagua: Adam with a frozen variance and momentum in 8 bits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...errors import ConfigError
from ...errors.checks import check_flag
from ..base import Compressor
from ..quantised.bytegrad import ByteGrad
from .base import FrozenAdam

__all__ = ["QAdam"]


class QAdam(FrozenAdam):
    """Adam on dense gradients for `warmup_steps`; then its variance is frozen and its momentum is sent in 8 bits.

    The rule is that of `FrozenAdam`; momentum changes slowly, so 8 bits suffice without error feedback. Bagua's own
    rule differs in three points, which `faithful` reproduces. With k counting from 1 and T = warmup_steps:

    - the gradient of step T is averaged and then lost: neither m nor v includes it;
    - the bias correction of v continues after v is frozen, so sqrt(v) / sqrt(1 - b2^k) shrinks, and steps grow by up to
      1 / sqrt(1 - b2^(T-1)): 3.3 for T = 100 and b2 = 0.999;
    - after the warm-up there is no weight decay, and every group uses the first group's b1.

    Args:
        warmup_steps: T; Bagua's default is 100. Raise it if the loss jumps afterwards.
        inner: compressor of the momentum; None is ByteGrad(). `Hierarchical(ByteGrad())` is Bagua's hierarchical=True.
        faithful: True follows Bagua's rule exactly, for comparison.

    In float32, gradients above 5.8e20 (at b2 = 0.999) overflow v, as Adam's, and a sum over ranks above 3.4e38 in the
    warm-up makes weights NaN: clip gradients that may come near.

    Costs as much as ByteGrad, 2 bytes per parameter, after T steps at 4. Raises the errors of `FrozenAdam`, and
    ConfigError for faithful=True with a warm-up of one step, after which v would be zero. Source: `QAdamOptimizer` of
    BaguaSys/bagua, which goes back to Tang et al., "1-bit Adam", ICML 2021, arXiv:2102.02888.
    """

    def __init__(self, warmup_steps: int = 100, inner: Compressor | None = None, faithful: bool = False) -> None:
        super().__init__(warmup_steps, ByteGrad() if inner is None else inner)
        self.faithful = check_flag(faithful, "faithful")
        if faithful and warmup_steps < 2:
            raise ConfigError(
                "QAdam(faithful=True) loses the last gradient of its warm-up: warmup_steps must be above 1"
            )

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, faithful={self.faithful})"

    def _beta1s(self) -> dict[Tensor, float]:
        beta1s = super()._beta1s()
        return dict.fromkeys(beta1s, self._attached.param_groups[0]["betas"][0]) if self.faithful else beta1s

    def _is_frozen(self, param: Tensor) -> bool:
        return self._steps(param) >= self.warmup_steps - self.faithful

    def _step(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not self.faithful:
            return super()._step(param, state, group)
        assert param.grad is not None
        state["step"] += 1
        step, (beta1, beta2) = int(state["step"]), group["betas"]
        if step > self.warmup_steps:
            state["exp_avg"].lerp_(param.grad, 1 - self._attached.param_groups[0]["betas"][0])
        spread = state["exp_avg_sq"].sqrt() / (1 - beta2**step) ** 0.5 + group["eps"]
        param.addcdiv_(state["exp_avg"], spread, value=-float(group["lr"]) / (1 - beta1**step))
        return None
