"""Lightning: `lightning.Trainer(strategy=DGCStrategy(dgcopt.DGC(0.01)))`, or `strategy="dgcopt"` once imported."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn

from .. import DGC, Averaging, Compressor
from ..checkpoint.directory import finished_checkpoints
from .exchange import Exchange, check_method, keep_gradients_local, read

__all__ = ["DGCStrategy"]

ENTRY = "dgcopt"
"""Key in Lightning's checkpoint: its file name when saved, as `save_last="link"` may copy it under another name."""


class DGCStrategy(DDPStrategy):
    """Lightning's DDPStrategy with gradients exchanged by a compressor, or weights by an averaging algorithm.

    Args:
        method: such as `dgcopt.DGC(0.01)`, `dgcopt.TopK(0.01)` or `dgcopt.LocalSGD(every=8)`; None is `dgcopt.DGC()`.
        settings: of `DDPStrategy`, as keywords.

    Beside each checkpoint `NAME` a folder `NAME.dgcopt` holds every rank's part; keep them together, on a path that all
    machines share. `gradient_clip_val` clips each rank's gradient before it is exchanged, and not the mean. If several
    optimizers step the model, each has the method for its own parameters.

    Attributes:
        exchange: has `exchange.optimizers[0].telemetry`; None before `fit`.
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
        if trainer.state.fn == TrainerFn.FITTING and self.optimizers and self.model is not None:
            model = keep_gradients_local(self.model)
            if self.exchange is None or self.exchange.optimizers != self.optimizers:  # fit() again may have the same
                self.exchange = Exchange(model, self.optimizers, self.method)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write Lightning's checkpoint, and every rank's part beside it."""
        exchange = self.exchange if "optimizer_states" in checkpoint else None
        if exchange is not None:
            checkpoint[ENTRY] = os.path.basename(filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if exchange is not None:
            exchange.save(_beside(filepath), checkpoint["global_step"])

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove Lightning's checkpoint and the ranks' parts."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_beside(filepath), ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load Lightning's checkpoint; the ranks' parts follow with the optimizers."""
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._loaded_from = _find_parts(checkpoint_path, checkpoint)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part, and the optimizers' state."""
        if self.exchange is not None and self._loaded_from is not None:
            self.exchange.use(read(self._loaded_from))
        super().load_optimizer_state_dict(checkpoint)


def _beside(path: Any) -> str:
    return f"{path}.dgcopt"


def _find_parts(path: Any, checkpoint: Mapping[str, Any]) -> str:
    """Return the folder of the ranks' parts, also for a link to a checkpoint or a copy in the same folder.

    Of several folders, the one with the checkpoint's step: a link may have replaced a checkpoint with parts.
    """
    if "://" not in str(path):
        copied = os.path.join(os.path.dirname(path), checkpoint.get(ENTRY, ""))
        for folder in map(_beside, (os.path.realpath(path), path, copied)):
            if checkpoint.get("global_step") in finished_checkpoints(Path(folder)):
                return folder
    return _beside(path)


StrategyRegistry.register(DGCStrategy.strategy_name, DGCStrategy, description="DDP with gradients sent by dgcopt.DGC()")
