"""The same on CUDA. Skipped where there is none; DGCOPT_TEST_DEVICE=cpu runs what a CPU can."""

import copy
import functools
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam

import dgcopt
from dgcopt.collectives import AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter
from dgcopt.comm.torch import TorchComm
from dgcopt.compressors.sparse.schedule import Selection
from dgcopt.exchange import commit
from dgcopt.gradients.tracker import GradientTracker
from dgcopt.kernels.reductions.torch import block_maxima
from dgcopt.testing import check_compressor
from tests.support.library import SETTINGS
from tests.support.worlds import Ranks, bucket_of, flat_gradient, small_model

DEVICE = torch.device(os.environ.get("DGCOPT_TEST_DEVICE", "cuda"))
ON_CUDA = DEVICE.type == "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(ON_CUDA and not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def test_selection_is_exact():
    torch.manual_seed(0)
    tensors = [torch.randn(100_003, device=DEVICE), torch.randn(70, 30, device=DEVICE)]
    bucket = bucket_of(tensors)
    for place, tensor in enumerate(tensors):
        bucket.fill([place], [tensor])
    chosen = Selection(bucket.segments, 0.01).largest(bucket.grad, block_maxima(bucket.grad))
    for segment, tensor in zip(bucket.segments, tensors, strict=True):
        mine = chosen[(chosen >= segment.start) & (chosen < segment.stop)]
        expected = tensor.flatten().abs().topk(len(mine)).values
        assert torch.equal(bucket.grad[mine].abs().sort(descending=True).values, expected)


@pytest.mark.parametrize("compressor", [dgcopt.NoCompression(), dgcopt.FP16(), dgcopt.DGC(0.05)], ids=repr)
def test_training_equals_the_cpu(compressor):
    on_cpu, on_gpu = (
        Ranks(3, lambda p: SGD(p, lr=0.1, momentum=0.9), model=model, compression=compressor)
        for model in (small_model, lambda: small_model().to(DEVICE))
    )
    for seed in range(4):
        on_cpu.step(seed)
        on_gpu.step(seed)
        on_gpu.assert_replicas_equal()
    for ours, theirs in zip(on_gpu.weights(), on_cpu.weights(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("compressor", "given"), SETTINGS, ids=[repr(c)[:80] for c, _ in SETTINGS])
def test_it_keeps_what_every_compressor_must(compressor, given):
    assert not check_compressor(compressor, sizes=(1, 3), device=DEVICE.type, **given).failures


# -- what the host waits for -------------------------------------------------------------------------------------------

COMPRESSORS = [
    dgcopt.NoCompression(),
    dgcopt.BF16(),
    dgcopt.DGC(0.05, overlap=True),
    dgcopt.DGC.compact(0.05, warmup=None, overlap=True),
    dgcopt.TopK(0.05),
    dgcopt.RandomK(0.05),
    dgcopt.QSGD(),
    dgcopt.SignSGD(),
    dgcopt.EFSignSGD(),
    dgcopt.PowerSGD(start_step=0),
]
MAY_WAIT = ((GradientTracker, "find_infinite"), (commit, "read_checks"))
"""The vote's read, and that of all checks of what has arrived; test_waits.py counts them without a device."""


def float_model() -> nn.Module:
    """Of several buckets."""
    return small_model(torch.float32).to(DEVICE)


def sync_debug(mode: str) -> None:
    if ON_CUDA:
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def no_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An error where the host waits for the device, but in `MAY_WAIT`."""

    def allowed(inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            sync_debug("default")
            try:
                return inner(*args, **kwargs)
            finally:
                sync_debug("error")

        return outer

    with monkeypatch.context() as patched:
        for owner, name in MAY_WAIT:
            patched.setattr(owner, name, allowed(getattr(owner, name)))
        sync_debug("error")
        try:
            yield
        finally:
            sync_debug("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_only_the_vote_and_what_arrives_is_waited_for(compressor, dtype, monkeypatch):
    ranks = Ranks(
        2,
        lambda p: SGD(p, lr=0.1),
        model=lambda: float_model().to(dtype),
        compression=compressor,
        bucket_mb=0.001,
        first_bucket_mb=0.001,
    )
    for seed in range(4):
        ranks.step(seed)
    inputs, targets = torch.randn(8, 12, device=DEVICE, dtype=dtype), torch.randint(5, (8,), device=DEVICE)
    for optimizer in ranks.optimizers:
        optimizer.zero_grad()
    losses = [nn.functional.cross_entropy(model(inputs), targets) for model in ranks.models]
    with no_waits(monkeypatch):
        for loss in losses:
            loss.backward()
        for optimizer in ranks.optimizers:
            optimizer.step()


@pytest.mark.skipif(not ON_CUDA, reason="counts what a device has allocated")
def test_memory_does_not_grow():
    ranks = Ranks(2, lambda p: SGD(p, lr=0.01, momentum=0.9), model=float_model, compression=dgcopt.DGC(0.05))
    used = []
    for seed in range(1000):
        ranks.step(seed)
        if seed in (99, 999):
            used.append(torch.cuda.memory_allocated())
    assert used[1] <= used[0] + 4096, f"{used[1] - used[0]} bytes more after 900 steps"


# -- what else trains on a device --------------------------------------------------------------------------------------


def trained(prepare: Callable[[nn.Module], Any] = lambda model: model, make: Any = None, **settings: Any) -> nn.Module:
    """A model after some steps as rank 0 of two, whose forward pass `prepare` has changed."""
    make = make or functools.partial(SGD, lr=0.05, momentum=0.9)
    models = [float_model() for _ in range(2)]
    forward = [prepare(model) for model in models]
    optimizers = [
        dgcopt.DistributedOptimizer(make(model.parameters()), model.named_parameters(), comm=comm, **settings)
        for model, comm in zip(models, dgcopt.simulated_world(2), strict=True)
    ]
    random = torch.Generator().manual_seed(3)
    for _ in range(6):
        for run, optimizer in zip(forward, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=False)
            run(torch.randn(8, 12, generator=random).to(DEVICE)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return models[0]


def assert_close(one: nn.Module, other: nn.Module) -> None:
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_on_another_stream():
    with torch.cuda.stream(torch.cuda.Stream()) if ON_CUDA else nullcontext():
        ours = trained(compression=dgcopt.DGC(0.1, overlap=True))
    if ON_CUDA:
        torch.cuda.synchronize()
    assert_close(ours, trained(compression=dgcopt.DGC(0.1, overlap=True)))


def test_compiled_model():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = trained(torch.compile, compression=dgcopt.DGC(0.1))
    assert_close(ours, trained(compression=dgcopt.DGC(0.1)))


@pytest.mark.skipif(not ON_CUDA, reason="there are graphs on CUDA only")
def test_graphed_model_and_capturable_optimizer():
    def graphed(model: nn.Module) -> Any:
        return torch.cuda.make_graphed_callables(copy.copy(model), (torch.randn(8, 12, device=DEVICE),))

    make = functools.partial(Adam, lr=0.01, eps=1e-3, capturable=True)
    for compressor in (dgcopt.NoCompression(), dgcopt.DGC(0.1)):
        ours = trained(graphed, make, compression=compressor)
        assert_close(ours, trained(make=functools.partial(Adam, lr=0.01, eps=1e-3), compression=compressor))
        assert flat_gradient(ours).isfinite().all()


def test_nccl_takes_every_collective():
    """Of a single rank, for which alone no `Comm` starts any."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    comm = TorchComm(init_method=place, rank=0, size=1, deadline=30)
    try:
        assert not ON_CUDA or "cuda:nccl" in str(dist.get_backend_config())
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            sent = torch.arange(12, device=DEVICE).to(dtype).view(1, 12)
            for kind in (AllReduce, AllGather, AllToAll, Broadcast, ReduceScatter):
                collective = kind(sent.clone())
                if not comm.supports(collective):
                    continue
                result = comm.wait(comm._start(collective, (0,)))
                assert torch.equal(result.flatten(), sent.flatten()), (kind, dtype)
    finally:
        comm.close()
