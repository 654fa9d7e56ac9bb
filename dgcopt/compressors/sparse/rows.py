"""Exchange of autograd's sparse gradients (`nn.Embedding(sparse=True)`): the sum of all ranks' rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...collectives import AllGather, Exchange
from ...errors import PayloadError
from ...flat.memory import at_least_float32

__all__ = ["gather_rows"]


def gather_rows(grad: Tensor, divisor: int) -> Exchange:
    """Average a sparse COO gradient over ranks that hold different numbers of rows.

    Gathers counts first, then indices and values padded to the longest. Returns a coalesced sparse tensor of `grad`'s
    shape, the sum of all ranks' rows divided by `divisor`; half precision is summed in float32 and rounded once.
    Raises PayloadError for invalid counts or indices.
    """
    grad = grad.coalesce()
    indices, values = grad.indices(), grad.values()
    count = torch.tensor([values.shape[0]], dtype=torch.int64, device=values.device)
    counts = [int(c) for c in (yield AllGather(count)).flatten()]
    shape = grad.shape[: grad.sparse_dim()]
    for rank, rows in enumerate(counts):
        if not 0 <= rows <= math.prod(shape):
            raise PayloadError(f"rank {rank} announced {rows} rows of a sparse gradient that has {math.prod(shape)}")
    longest = max(counts)
    padded_indices = indices.new_zeros(indices.shape[0], longest)
    padded_indices[:, : indices.shape[1]] = indices
    padded_values = values.new_zeros(longest, *values.shape[1:])
    padded_values[: values.shape[0]] = values
    all_indices = yield AllGather(padded_indices)
    all_values = yield AllGather(padded_values)
    limits = torch.tensor(shape, device=indices.device).unsqueeze(1)
    for rank, rows in enumerate(counts):
        theirs = all_indices[rank, :, :rows]
        if bool(((theirs < 0) | (theirs >= limits)).any()):
            raise PayloadError(f"the message from rank {rank} holds rows beyond the {tuple(shape)} that there are")
    wider = at_least_float32(grad.dtype)
    total = torch.sparse_coo_tensor(
        torch.cat([rows[:, :n] for rows, n in zip(all_indices, counts, strict=True)], dim=1),
        torch.cat([rows[:n] for rows, n in zip(all_values, counts, strict=True)]).to(wider) / divisor,
        grad.shape,
        check_invariants=True,
    )
    return total.coalesce().to(grad.dtype)
