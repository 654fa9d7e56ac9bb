"""Hugging Face's Trainer: one line before `trainer.train()`.

dgcopt.integrations.trainer.attach(trainer, dgcopt.DGC(0.01))
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from .. import Averaging, Compressor
from ..exchange.parameters import inner_optimizer
from .exchange import Exchange, Parts, check_method, keep_gradients_local, read

__all__ = ["Callback", "attach"]

FOLDER = "dgcopt"
"""The ranks' parts, in a checkpoint of Trainer."""


class Callback(transformers.TrainerCallback):
    """Attaches a method when training begins, and saves and restores each rank's part with Trainer's checkpoints.

    Attributes:
        exchange: has `exchange.optimizers[0].telemetry`; None before training begins.
    """

    def __init__(
        self, trainer: transformers.Trainer, method: Compressor | Averaging, resume: str | Path | None = None
    ) -> None:
        self.trainer, self.method, self.resume = trainer, check_method(method), resume
        self.exchange: Exchange | None = None
        self._has_loaded = False  # the optimizer's state, in this train()

    def on_train_begin(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Attach the method; load this rank's part if Trainer has resumed from a checkpoint."""
        inner = keep_gradients_local(self.trainer.model_wrapped)
        if self.exchange is None or self.exchange.optimizers != [inner_optimizer(self.trainer.optimizer)]:
            self.exchange = Exchange(inner, [self.trainer.optimizer], self.method, self._find)
            if parts := self._find():
                self.exchange.resume(parts)
        elif state.global_step and not self._has_loaded:  # train() again, from a checkpoint without optimizer.pt
            self.exchange.resume(self._find() or {})
        self._has_loaded = False

    def _find(self) -> Parts | None:
        """Return this rank's part of the checkpoint from which Trainer resumes; None if it does not."""
        self._has_loaded = True
        step, output = self.trainer.state.global_step, Path(str(self.trainer.args.output_dir))
        if self.exchange is None or not self.trainer.is_in_train or step == 0:
            return None
        folder = Path(self.resume or output / f"checkpoint-{step}") / FOLDER
        if parts := read(folder):
            self.exchange.check(parts, folder)
        return parts

    def on_save(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Write every rank's part into the checkpoint that rank 0 has written."""
        if self.exchange is not None and not args.save_only_model:
            folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / FOLDER
            self.exchange.save(folder, state.global_step)


def attach(trainer: transformers.Trainer, method: Compressor | Averaging, resume: str | Path | None = None) -> Callback:
    """Let `trainer` exchange gradients by a compressor, or weights by an averaging algorithm. Returns the callback.

    Args:
        trainer: before `train()`. It wraps the model in DDP under `torchrun` or `accelerate launch`.
        method: such as `dgcopt.DGC(0.01)` or `dgcopt.DiLoCo(every=32)`.
        resume: the folder that `train(resume_from_checkpoint=...)` is given, where it is not in `output_dir`.

    `max_grad_norm`, 1.0 unless set, clips each rank's gradient before it is exchanged, and not the mean; 0 turns it
    off. `output_dir` must be shared by all machines. In `train()`, raises CheckpointError if the ranks' parts belong to
    another checkpoint than Trainer's.
    """
    callback = Callback(trainer, method, resume)
    trainer.add_callback(callback)
    return callback
