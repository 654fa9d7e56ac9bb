"""The speed of the wire, measured once, for compressors that choose their collectives by it."""

from __future__ import annotations

import math
import time
from collections.abc import Generator

import torch
from torch import Tensor

from ..collectives import AllGather, AllReduce, Collective, Link
from ..comm import Comm
from ..compressors import Compressor
from ..errors import CommError
from .agreement import DAMAGED

__all__ = ["measure_link"]

_BYTES = 2**20  # received by each rank in the allgather
_TIMES = 3  # measurements, after one that opens connections; the fastest counts


def measure_link(comm: Comm, compressor: Compressor, device: torch.device) -> Generator[Collective, Tensor, None]:
    """Measure `comm.link` if the compressor needs it and it is unknown; the result is the same on all ranks.

    Measures the wire that carries buckets on `device`, because CUDA tensors may use another library than CPU tensors.
    The clock is read when the device has finished, because NCCL returns before messages arrive.

    The link is that of the slowest rank. All ranks must call this at the same place, with no collective in flight.
    Raises CommError for numbers that cannot be right.
    """
    if comm.link is not None or comm.size == 1 or not compressor.asks_link:
        return
    each = -(-_BYTES // (comm.size - 1))
    little, much = [], []
    for _ in range(1 + _TIMES):
        one, many = torch.zeros(1, device=device), torch.zeros(each, dtype=torch.uint8, device=device)
        start = _now(device)
        yield AllReduce(comm.to_wire(one), label="latency")
        between = _now(device)
        yield AllGather(comm.to_wire(many), label="bandwidth")
        little.append(between - start)
        much.append(_now(device) - between)
    latency, took = min(little[1:]), min(much[1:])
    # a background thread that polls for work, such as Horovod's, may delay the small message
    per_byte = max(took - latency, took / 10) / (each * (comm.size - 1))
    mine = torch.tensor([latency, per_byte], dtype=torch.float64)
    agreed = yield AllReduce(comm.to_wire(mine), op="max", label="latency and bandwidth of the slowest rank")
    latency, per_byte = agreed.tolist()
    if not (0 < latency < math.inf and 0 < per_byte < math.inf):
        raise CommError(
            f"rank {comm.rank}: the slowest rank's latency of {latency} s, and {per_byte} s for each byte, cannot be: "
            f"{DAMAGED}"
        )
    comm.set_link(Link(latency, 1 / per_byte))


def _now(device: torch.device) -> float:
    """Return the time at which a device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
