"""Compressors and averaging algorithms in Hugging Face's Trainer, Lightning, Fabric and Accelerate, by one line each.

    dgcopt.integrations.trainer.attach(trainer, dgcopt.DGC(0.01))
    lightning.Trainer(strategy=dgcopt.integrations.lightning.DGCStrategy(dgcopt.DGC(0.01)))
    lightning.Fabric(strategy=dgcopt.integrations.fabric.DGCStrategy(dgcopt.DGC(0.01)))
    dgcopt.integrations.accelerate.attach(accelerator, model, optimizer, dgcopt.DGC(0.01))

Each module imports its framework, so import the one that you use.
"""

import importlib
from typing import Any

__all__ = ["accelerate", "fabric", "lightning", "trainer"]


def __getattr__(name: str) -> Any:
    """Import modules on first use."""
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
