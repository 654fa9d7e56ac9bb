"""Accelerate: one line after `accelerator.prepare`.

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
dgcopt.integrations.accelerate.attach(accelerator, model, optimizer, dgcopt.DGC(0.01))
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from accelerate import Accelerator
from torch import nn

from .. import Averaging, Compressor
from .exchange import Exchange, agree_on_overflow, keep_gradients_local, read

__all__ = ["attach"]


def attach(accelerator: Accelerator, model: nn.Module, optimizer: Any, method: Compressor | Averaging) -> Exchange:
    """Let a prepared model exchange gradients by a compressor, or weights by an averaging algorithm.

    Args:
        accelerator: its `save_state` and `load_state` then write and read every rank's part too, in a folder `dgcopt`
            or `dgcopt_2`, `dgcopt_3`, ... for further models. The path must be shared by all machines.
        model, optimizer: as `accelerator.prepare` returns them; before the first backward pass. Several optimizers: a
            list.
        method: such as `dgcopt.DGC(0.01)`, `dgcopt.LocalSGD(every=8)` or `dgcopt.DiLoCo(every=32)`.

    Returns the exchange, with `exchange.optimizers[0].telemetry`. `accelerator.clip_grad_norm_` clips each rank's
    gradient before it is exchanged, and not the mean. Raises ConfigError if the model is not in DDP, and what
    `dgcopt.DistributedOptimizer` raises.
    """
    optimizers = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    exchange = Exchange(keep_gradients_local(model), optimizers, method)
    agree_on_overflow(accelerator.scaler)
    number = _attached[accelerator] = _attached.get(accelerator, 0) + 1
    name = "dgcopt" if number == 1 else f"dgcopt_{number}"

    def save(models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        exchange.save(Path(folder) / name, 0)

    def find(models: list[nn.Module], folder: str) -> None:
        exchange.use(read(Path(folder) / name))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(find)
    return exchange


_attached: WeakKeyDictionary[Accelerator, int] = WeakKeyDictionary()
"""Number of models with an exchange."""
