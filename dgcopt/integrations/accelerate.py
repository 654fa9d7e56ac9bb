"""Accelerate: one line after `accelerator.prepare`.

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
dgcopt.integrations.accelerate.attach(accelerator, model, optimizer, dgcopt.DGC(0.01))
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

from accelerate import Accelerator
from torch import nn

from .. import Averaging, Compressor
from .exchange import Exchange, keep_gradients_local, read

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
    if accelerator not in _attached:
        _attached[accelerator] = []
        _follow_checkpoints(accelerator)
    _attached[accelerator].append(ref(exchange))
    return exchange


_attached: WeakKeyDictionary[Accelerator, list[ref[Exchange]]] = WeakKeyDictionary()
"""Exchanges of an accelerator's models in the order of `attach`; their optimizers hold them."""


def _exchanges(accelerator: Accelerator, models: list[nn.Module], folder: str) -> Iterator[tuple[Path, Exchange]]:
    """Yield the exchange of each prepared model with its folder in a checkpoint.

    `free_memory`, as before a retry with smaller batches, leaves earlier models out.
    """
    prepared = {module for model in models for module in model.modules()}
    living = (each() for each in _attached[accelerator])
    kept = [each for each in living if each is not None and each.model in prepared]
    for number, exchange in enumerate(kept, start=1):
        yield Path(folder) / ("dgcopt" if number == 1 else f"dgcopt_{number}"), exchange


def _follow_checkpoints(accelerator: Accelerator) -> None:
    """Save and load the ranks' parts with an accelerator's checkpoints."""

    def save(models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        for path, exchange in _exchanges(accelerator, models, folder):
            exchange.save(path, 0)

    def find(models: list[nn.Module], folder: str) -> None:
        for path, exchange in _exchanges(accelerator, models, folder):
            exchange.use(read(path))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(find)
