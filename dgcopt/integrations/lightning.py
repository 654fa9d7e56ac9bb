"""Lightning: `lightning.Trainer(strategy=DGCStrategy(dgcopt.DGC(0.01)))`, or `strategy="dgcopt"` once imported."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from .. import DGC, Averaging, Compressor
from .exchange import Exchange, check_method, keep_gradients_local, read

__all__ = ["DGCStrategy"]


class DGCStrategy(DDPStrategy):
    """Lightning's DDPStrategy with gradients exchanged by a compressor, or weights by an averaging algorithm.

    Args:
        method: such as `dgcopt.DGC(0.01)`, `dgcopt.TopK(0.01)` or `dgcopt.LocalSGD(every=8)`; None is `dgcopt.DGC()`.
        settings: of `DDPStrategy`, as keywords.

    Beside each checkpoint `NAME` a folder `NAME.dgcopt` holds every rank's part; keep them together, on a path that all
    machines share. `gradient_clip_val` clips each rank's gradient before it is exchanged, and not the mean. If several
    optimizers step the model, each has the method for its own parameters.

    Attributes: `exchange`, with `exchange.optimizers[0].telemetry`; None before `fit`.
    """

    strategy_name = "dgcopt"

    def __init__(self, method: Compressor | Averaging | None = None, **settings: Any) -> None:
        if isinstance(method, Averaging):  # buffers stay local, as weights do
            settings.setdefault("broadcast_buffers", False)
        super().__init__(**settings)
        self.method = check_method(DGC() if method is None else method)
        self.exchange: Exchange | None = None
        self._loaded_from: str | None = None

    def setup(self, trainer: Trainer) -> None:
        """Attach the method to the optimizers, where Lightning trains."""
        super().setup(trainer)
        if self.optimizers and self.model is not None:
            self.exchange = Exchange(keep_gradients_local(self.model), self.optimizers, self.method)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write Lightning's checkpoint, and every rank's part beside it."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.exchange is not None and "optimizer_states" in checkpoint:
            self.exchange.save(_beside(filepath), checkpoint["global_step"])

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove Lightning's checkpoint and the ranks' parts."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_beside(filepath), ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load Lightning's checkpoint; the ranks' parts follow with the optimizers."""
        self._loaded_from = _beside(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part, and the optimizers' state."""
        if self.exchange is not None and self._loaded_from is not None:
            self.exchange.use(read(self._loaded_from))
        super().load_optimizer_state_dict(checkpoint)


def _beside(path: Any) -> str:
    return f"{path}.dgcopt"


StrategyRegistry.register(DGCStrategy.strategy_name, DGCStrategy, description="DDP with gradients sent by dgcopt.DGC()")
