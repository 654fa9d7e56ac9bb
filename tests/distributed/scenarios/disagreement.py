"""Ranks that disagree are told so, all of them, with the parameter or setting by name; and the wire stays usable."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import dgcopt
import dgcopt.hvd as hvd
from dgcopt import DGC, Comm, MismatchError
from dgcopt.collectives import AllGather, AllReduce
from dgcopt.compressors import Context, GradientExchange


def ranks_disagree(comm: Comm) -> None:
    odd = comm.rank == comm.size - 1

    def layer(out: int = 3, dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Module:
        return nn.Sequential(nn.Linear(2, out, bias=bias, dtype=dtype))

    sgd, adam = torch.optim.SGD, torch.optim.Adam
    cases: dict[str, tuple[nn.Module, dict[str, Any], type]] = {
        "parameter 0.weight: float32 (4, 2)": (layer(4 if odd else 3), {}, sgd),
        "parameter 0.weight: float64": (layer(dtype=torch.float64 if odd else torch.float32), {}, sgd),
        "number of parameters: 1": (layer(bias=not odd), {}, sgd),
        "ratio=0.02": (layer(), {"compression": DGC(0.02 if odd else 0.01)}, sgd),
        "compression: FP16()": (layer(), {"compression": dgcopt.FP16() if odd else None}, sgd),
        "backward_passes_per_step: 2": (layer(), {"backward_passes_per_step": 2 if odd else 1}, sgd),
        "op: sum": (layer(), {"op": "sum" if odd else "average"}, sgd),
        "bucket_mb: 2": (layer(), {"bucket_mb": 2 if odd else 3}, sgd),
        "optimizer: Adam": (layer(), {}, adam if odd else sgd),
    }
    for words, (model, settings, kind) in cases.items():
        optimizer = kind(model.parameters(), lr=0.1)
        try:
            dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), comm=comm, **settings)
        except MismatchError as error:
            for part in (words, f"rank {comm.rank}", f"rank {comm.size - 1} has"):
                assert part in str(error), f"does not say {part!r}: {error}"
        else:
            raise AssertionError(f"rank {comm.rank} did not notice {words}")
        assert comm.run(AllReduce(torch.ones(3), op="sum")).tolist() == [comm.size] * 3


def ranks_start_otherwise(comm: Comm) -> None:
    """Which Gloo takes for what it is not, or ends the process."""
    odd = comm.rank == comm.size - 1
    ones = {"a": torch.ones(3), "b": torch.ones(3)}
    cases: dict[str, tuple[dict[str, torch.Tensor], int]] = {
        "a: float32 (4,)": ({**ones, "a": torch.ones(4)}, 0),
        "a: float64 (3,)": ({**ones, "a": torch.ones(3, dtype=torch.float64)}, 0),
        "b: float32 (3,)": ({"b": ones["b"], "a": ones["a"]}, 0),
        "(nothing)": ({"a": ones["a"]}, 0),
        "root rank: 1": (ones, 1),
    }
    for words, (tensors, root) in cases.items():
        expect_mismatch(
            comm, words, partial(dgcopt.broadcast_parameters, *((tensors, root) if odd else (ones, 0)), comm)
        )


def states_of_other_optimizers(comm: Comm) -> None:
    """Which torch would load, and miss settings at the next step."""
    odd = comm.rank == comm.size - 1
    param, more = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    sgd, other = torch.optim.SGD([param]), (torch.optim.Adam if odd else torch.optim.SGD)([param])
    longer = torch.optim.SGD([{"params": [param]}, *([{"params": [more]}] if odd else [])])
    cases: dict[str, tuple[torch.optim.Optimizer, int]] = {
        "optimizer: Adam": (other, 0),
        "groups: [1, 1]": (longer, 0),
        "root rank: 1": (sgd, int(odd)),
    }
    for words, (optimizer, root) in cases.items():
        expect_mismatch(comm, words, partial(dgcopt.broadcast_optimizer_state, optimizer, root, comm))


def hvd_collectives_differ(comm: Comm) -> None:
    """Blocking or not. Horovod asks by itself whether they do."""
    odd = comm.rank == comm.size - 1
    hvd.init()
    if comm.wire == "horovod":
        for call in (hvd.allreduce, partial(hvd.broadcast, root_rank=0)):
            try:
                call(torch.ones(3, 2) if odd else torch.ones(2, 3))
            except hvd.HorovodInternalError as error:
                assert "shape" in str(error).lower(), error
            else:
                raise AssertionError("Horovod was not told of the shape")
        return
    three, threes, rows = torch.ones(4 if odd else 3), torch.ones(3), torch.ones(2, 4 if odd else 3)
    doubles = torch.ones(3, dtype=torch.float64 if odd else torch.float32)
    whole = torch.ones(3, dtype=torch.int32 if odd else torch.float32)
    sparse = torch.sparse_coo_tensor([[0, 1]], rows, (2, rows.shape[1]))
    longer = "float32 (4,)"
    expect_mismatch(comm, longer, partial(hvd.allreduce, three))
    expect_mismatch(comm, "float64 (3,)", partial(hvd.allreduce_, doubles))
    expect_mismatch(comm, "with op 1", partial(hvd.allreduce, threes, op=hvd.Sum if odd else hvd.Average))
    expect_mismatch(comm, "with op 5", partial(hvd.allreduce_async, threes, op=hvd.Product if odd else hvd.Sum))
    expect_mismatch(comm, "factors 2, 1", partial(hvd.allreduce_async_, threes, prescale_factor=2 if odd else 1))
    expect_mismatch(comm, "int32 (3,)", partial(hvd.allreduce_async, whole))
    expect_mismatch(comm, "x.1", partial(hvd.grouped_allreduce_async, [threes, three], name="x"))
    expect_mismatch(comm, "x.1", partial(hvd.grouped_allreduce_async_, [threes] * (2 if odd else 1), name="x"))
    expect_mismatch(comm, longer, partial(hvd.broadcast, three, 0))
    expect_mismatch(comm, "from rank 1", partial(hvd.broadcast_, threes, int(odd)))
    expect_mismatch(comm, longer, partial(hvd.broadcast_async_, three, 0))
    expect_mismatch(comm, "float64 (3,)", partial(hvd.reducescatter, doubles))
    expect_mismatch(comm, longer, partial(hvd.reducescatter_async, three))
    expect_mismatch(comm, "('any', 4)", partial(hvd.allgather_async, rows))
    expect_mismatch(comm, "('any', 4)", partial(hvd.alltoall_async, torch.ones(comm.size, len(three))))
    expect_mismatch(comm, "('any', 4)", partial(hvd.sparse_allreduce_async, sparse, "x", hvd.Sum))
    expect_mismatch(comm, "hvd.allreduce b", partial(hvd.allreduce_async, threes, name="b" if odd else "a"))
    expect_mismatch(comm, "hvd.allgather", partial(hvd.allgather_async if odd else hvd.allreduce_async, threes))
    expect_mismatch(comm, "hvd.barrier", hvd.barrier if odd else partial(hvd.allreduce_async, threes))
    assert hvd.allreduce(threes, op=hvd.Sum).tolist() == [comm.size] * 3


class OfItsOwn(dgcopt.Compressor):
    """Ranks yield other collectives than the last one does, which `odd` says."""

    def __init__(self, odd: str) -> None:
        self.odd = odd

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        odd = self.odd if ctx.rank == ctx.size - 1 else ""
        if odd != "one less":
            yield AllGather(grad[: 9 if odd == "length" else 8])
        if odd == "kind":
            yield AllGather(grad)
        return (yield AllReduce(grad.double() if odd == "dtype" else grad, op="sum" if odd == "op" else "average"))


def compressors_send_otherwise(comm: Comm) -> None:
    """By mistakes of whoever wrote them, which end the process, or keep ranks waiting."""
    cases = {
        "length": "AllGather[9 float32]",
        "kind": "AllGather[128 float32]",
        "dtype": "AllReduce[128 float64]",
        "op": "op='sum'",
        "one less": "AllReduce[128 float32]",
    }
    for odd, words in cases.items():
        model = nn.Linear(3, 2)
        nn.init.ones_(model.weight), nn.init.ones_(model.bias)
        optimizer = dgcopt.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), OfItsOwn(odd), comm=comm, bucket_mb=1e-4
        )
        model(torch.ones(1, 3)).sum().backward()
        expect_mismatch(comm, words, optimizer.step)


def expect_mismatch(comm: Comm, words: str, call: Callable[[], Any]) -> None:
    """A MismatchError on every rank that says what the last one has; and the wire stays usable."""
    try:
        call()
    except MismatchError as error:
        assert words in str(error) and f"rank {comm.size - 1} has" in str(error), error
    else:
        raise AssertionError(f"rank {comm.rank} did not notice {words}")
    assert comm.run(AllReduce(torch.ones(3), op="sum")).tolist() == [comm.size] * 3


SCENARIOS: dict[str, Callable[[Comm], Any]] = {
    "disagreement: found by all": ranks_disagree,
    "disagreement: broadcast_parameters": ranks_start_otherwise,
    "disagreement: broadcast_optimizer_state": states_of_other_optimizers,
    "disagreement: hvd": hvd_collectives_differ,
    "disagreement: a compressor of one's own": compressors_send_otherwise,
}
