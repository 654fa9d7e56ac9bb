"""torch's own wrappers of data-parallel and sharded training, on two real ranks over Gloo."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

import dgcopt
from dgcopt import Comm
from tests.compatibility.replicas import ALONE, STEPS, Replicas, assert_close, batch, flat, perceptron, squared
from tests.compatibility.table import Absent, refusal, trial

PARALLEL = "Data-parallel and sharded"


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def in_ddp(comm: Comm, compressor: Any, run: Any = None, make: Any = sgd, **settings: Any) -> Tensor:
    """Weights after some steps of DDP with a hook; `run` makes of the DDP model what is called."""
    model = perceptron()
    optimizer = make(model)
    wrapped = DDP(model, **settings)
    if compressor is not None:
        wrapped.register_comm_hook(*dgcopt.ddp_hook(compressor, optimizer, model.named_parameters()))
    called = wrapped if run is None else run(wrapped)
    for step in range(STEPS):
        optimizer.zero_grad()
        squared(called, *batch(step, comm.rank)).backward()
        optimizer.step()
    dgcopt.check_replicas(model.named_parameters(), comm=comm)
    return flat(model)


@trial(PARALLEL, "DDP with `ddp_hook`", real=True)
def hook(comm: Comm) -> None:
    whole = Replicas(sgd, comms=ALONE).train().weights
    assert_close(in_ddp(comm, None), whole, "DDP")
    assert_close(in_ddp(comm, dgcopt.DGC(1.0)), whole, "DGC at ratio 1")
    for settings in ({"static_graph": True}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        assert torch.equal(in_ddp(comm, dgcopt.DGC(0.1), **settings), in_ddp(comm, dgcopt.DGC(0.1)))


@trial(
    PARALLEL,
    "DDP and `DistributedOptimizer` at once",
    note="a warning: DDP sends everything besides, and nothing is saved",
    real=True,
)
def both(comm: Comm) -> None:
    """Warned of: DDP sends everything dense beside what is compressed."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listener, logger = Listener(logging.WARNING), logging.getLogger("dgcopt")
    logger.addHandler(listener)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = perceptron()
            wrapped, optimizer = DDP(model), sgd(model)
            try:
                dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), dgcopt.DGC(0.1))
                for step in range(2):
                    optimizer.zero_grad()
                    squared(wrapped, *batch(step, comm.rank)).backward()
                    optimizer.step()
            except dgcopt.ConfigError as error:
                said.append(str(error))
    finally:
        logger.removeHandler(listener)
    found = [line for line in [*said, *(str(one.message) for one in caught)] if "DistributedDataParallel" in line]
    assert found or comm.rank, "rank 0 said nothing"


@trial(PARALLEL, "`torch.compile` of a DDP model with `ddp_hook`", real=True)
def compiled_ddp(comm: Comm) -> None:
    plain = in_ddp(comm, dgcopt.DGC(0.1))
    for optimize in (False, "ddp_optimizer"):
        before = torch._dynamo.config.optimize_ddp
        torch._dynamo.config.optimize_ddp = optimize
        try:
            compiled = in_ddp(comm, dgcopt.DGC(0.1), lambda ddp: torch.compile(ddp, backend="aot_eager"))
        finally:
            torch._dynamo.config.optimize_ddp = before
            torch._dynamo.reset()
        assert_close(compiled, plain, f"optimize_ddp={optimize}")


@trial(PARALLEL, "DDP around a compiled model with `ddp_hook`", real=True)
def ddp_of_compiled(comm: Comm) -> None:
    model = perceptron()
    optimizer = sgd(model)
    wrapped = DDP(torch.compile(model, backend="aot_eager"))
    wrapped.register_comm_hook(*dgcopt.ddp_hook(dgcopt.DGC(0.1), optimizer, model.named_parameters()))
    for step in range(STEPS):
        optimizer.zero_grad()
        squared(wrapped, *batch(step, comm.rank)).backward()
        optimizer.step()
    torch._dynamo.reset()
    assert_close(flat(model), in_ddp(comm, dgcopt.DGC(0.1)), "DDP of a compiled model")


@trial(PARALLEL, "DDP's Join with `ddp_hook`", real=True)
def ddp_join(comm: Comm) -> None:
    model = perceptron()
    optimizer = sgd(model)
    wrapped = DDP(model)
    wrapped.register_comm_hook(*dgcopt.ddp_hook(dgcopt.DGC(0.5), optimizer, model.named_parameters()))
    with wrapped.join():
        for step in range(2 + comm.rank):
            optimizer.zero_grad()
            squared(wrapped, *batch(step, comm.rank)).backward()
            optimizer.step()


def joined(comm: Comm, divide_by_initial_world_size: bool) -> None:
    from torch.distributed.algorithms import Join

    ranks, whole = Replicas(sgd, comms=[comm]), Replicas(sgd, comms=ALONE)
    with Join(ranks.optimizers, divide_by_initial_world_size=divide_by_initial_world_size):
        for step in range(2 + 2 * comm.rank):
            ranks.step(step)
    (model,), (bare,) = whole.models, whole.optimizers
    for step in range(4):
        bare.zero_grad()
        there = [rank for rank in (0, 1) if step < 2 + 2 * rank]
        for rank in there:
            divisor = 2 if divide_by_initial_world_size else len(there)
            (squared(model, *batch(step, rank)) / divisor).backward()
        bare.step()
    assert_close(ranks.weights, whole.weights, f"Join, {divide_by_initial_world_size}")


@trial(PARALLEL, "torch's Join with `DistributedOptimizer`", real=True)
def join(comm: Comm) -> None:
    for initial in (True, False):
        joined(comm, initial)


@trial(PARALLEL, "`nn.DataParallel` on the CPU", real=True)
def data_parallel(comm: Comm) -> None:
    model = perceptron()
    optimizer = dgcopt.DistributedOptimizer(sgd(model), model.named_parameters(), comm=comm)
    wrapped = nn.DataParallel(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        squared(wrapped, *batch(step, comm.rank)).backward()
        optimizer.step()
    assert_close(flat(model), Replicas(sgd, comms=ALONE).train().weights, "DataParallel")


@trial(PARALLEL, "ZeroRedundancyOptimizer in `DistributedOptimizer`", real=True)
def zero(comm: Comm) -> str | None:
    """Gradients travel (its step hands every owner's part round), or it is refused."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    for kind, settings in (
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.Adam, {"lr": 0.01}),
    ):

        def sharded(model: nn.Module, kind: Any = kind, settings: Any = settings) -> Optimizer:
            return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, **settings)

        whole = Replicas(lambda model, kind=kind, more=settings: kind(model.parameters(), **more), comms=ALONE).train()
        for compression in (None, dgcopt.TopK(1.0), dgcopt.DGC(1.0), dgcopt.TopK(0.1)):
            try:
                ranks = Replicas(sharded, compression=compression, comms=[comm])
            except dgcopt.ConfigError as error:
                return str(error)
            ranks.train()
            momentum_is_ours = isinstance(compression, dgcopt.DGC) and settings.get("momentum")
            if not isinstance(compression, dgcopt.TopK) or compression.ratio == 1:
                assert_close(ranks.weights, whole.weights, f"{kind.__name__} {settings} {compression}", 1e-5)
            assert not momentum_is_ours or ranks is not None
    return None


@trial(PARALLEL, "ZeroRedundancyOptimizer beside DDP with `ddp_hook`", real=True)
def zero_beside_ddp(comm: Comm) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = perceptron()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    wrapped = DDP(model)
    wrapped.register_comm_hook(*dgcopt.ddp_hook(dgcopt.TopK(0.1), named_parameters=model.named_parameters()))
    for step in range(STEPS):
        optimizer.zero_grad()
        squared(wrapped, *batch(step, comm.rank)).backward()
        optimizer.step()
    dgcopt.check_replicas(model.named_parameters(), comm=comm)


def wrap(model: nn.Module, comm: Comm) -> Any:
    optimizer = dgcopt.DistributedOptimizer(sgd(model), model.named_parameters(), dgcopt.DGC(0.1), comm=comm)
    for step in range(2):
        optimizer.zero_grad()
        squared(model, *batch(step, comm.rank, dtype=torch.float32)).backward()
        optimizer.step()
    return optimizer


def model32() -> nn.Module:
    return perceptron().float()


@trial(PARALLEL, "FSDP1 in `DistributedOptimizer`", real=True)
def fsdp1(comm: Comm) -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(model32(), device_id=torch.device("cpu"))
    return refusal(dgcopt.ConfigError, "shard", of=lambda: wrap(model, comm))


@trial(PARALLEL, "FSDP1 with `use_orig_params=True` in `DistributedOptimizer`", real=True)
def fsdp1_original(comm: Comm) -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(model32(), device_id=torch.device("cpu"), use_orig_params=True)
    return refusal(dgcopt.ConfigError, "shard", of=lambda: wrap(model, comm))


@trial(PARALLEL, "FSDP2 (`fully_shard`) over all ranks in `DistributedOptimizer`", real=True)
def fsdp2(comm: Comm) -> str:
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # torch 2.4 and 2.5
        if not torch.cuda.is_available():
            raise Absent("before torch 2.6 fully_shard needs a GPU") from None
        from torch.distributed._composable.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    model = model32()
    fully_shard(model, mesh=mesh)  # over all ranks: no replica is left to exchange with
    return refusal(dgcopt.ConfigError, "replicate group of one", of=lambda: wrap(model, comm))


@trial(PARALLEL, "DTensor parameters (tensor parallel) in `DistributedOptimizer`", real=True)
def tensor_parallel(comm: Comm) -> str:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    try:
        from torch.distributed.tensor import Replicate
    except ImportError:  # torch 2.4
        from torch.distributed._tensor import Replicate

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    model = parallelize_module(model32(), mesh, {"0": ColwiseParallel(output_layouts=Replicate())})
    return refusal(dgcopt.ConfigError, "mesh", of=lambda: wrap(model, comm))


@trial(PARALLEL, "PostLocalSGDOptimizer of torch in `DistributedOptimizer`", real=True)
def post_local_sgd(comm: Comm) -> str | None:
    """Averages weights now and then that are equal already."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    def make(model: nn.Module) -> Optimizer:
        return PostLocalSGDOptimizer(sgd(model), PeriodicModelAverager(2, warmup_steps=0))

    try:
        ranks = Replicas(make, compression=dgcopt.DGC(1.0), comms=[comm])
    except dgcopt.ConfigError as error:
        return str(error)
    assert_close(ranks.train().weights, Replicas(sgd, comms=ALONE).train().weights, "PostLocalSGDOptimizer")
    return None
