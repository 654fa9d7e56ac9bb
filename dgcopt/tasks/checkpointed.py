"""Parts of train.py with a state for its checkpoints: random numbers, and the scale of the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["RandomNumbers", "Scaler"]


class RandomNumbers:
    """Torch's generators, each rank's own, with a state like a module's."""

    def __init__(self, device: torch.device) -> None:
        self.has_cuda = device.type == "cuda"

    def state_dict(self) -> dict[str, Tensor | None]:
        """Return the states of the generators."""
        return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state() if self.has_cuda else None}

    def load_state_dict(self, state: dict[str, Tensor | None]) -> None:
        """Restore the states of the generators."""
        if (cpu := state["cpu"]) is not None:
            torch.set_rng_state(cpu)
        if (cuda := state["cuda"]) is not None and self.has_cuda:
            torch.cuda.set_rng_state(cuda)


class Scaler(torch.amp.GradScaler):
    """Scales the loss; begins anew after a checkpoint of a run without scaling, whose state is empty."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, unless it is empty."""
        if state:
            super().load_state_dict(state)
