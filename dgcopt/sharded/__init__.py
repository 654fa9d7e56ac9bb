"""Sharded parameters: checkpoints through `torch.distributed.checkpoint`, and a compressed reduce-scatter.

    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state | {"dgcopt": dgcopt.sharded.state(optimizer)}, checkpoint_id=path)

    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    dgcopt.sharded.load(optimizer, path)

torch saves one replica's tensors for all. Residuals and momenta of `DistributedOptimizer` differ between replicas, and
so do Adam's moments if updates are sent, and weights and moments if weights are averaged: they have their own entry,
which any mesh can load.
"""

from __future__ import annotations

from .checkpoint import load, state
from .reduce_scatter import CompressedReduceScatter, compress_reduce_scatter

__all__ = ["CompressedReduceScatter", "compress_reduce_scatter", "load", "state"]
