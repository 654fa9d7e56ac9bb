"""What of the DDP hook shows in one process; everything else is in tests/distributed/test_ddp.py."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import dgcopt
from dgcopt.gradients.hook.bucket import Part
from dgcopt.gradients.hook.ddp import HookState
from tests.support.worlds import bucket_of, context_of, small_batch, small_model


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """torch.distributed with a single rank."""
    dgcopt.shutdown()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dgcopt.shutdown()
    dist.destroy_process_group()


def train(compressor: dgcopt.Compressor | HookState | None) -> tuple[list[Tensor], HookState | None]:
    model, state = small_model(), None
    ddp = DDP(model, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    if compressor is not None:
        state, hook = dgcopt.ddp_hook(compressor, optimizer)
        ddp.register_comm_hook(state, hook)
    for seed in range(3):
        inputs, targets = small_batch(seed=seed)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(inputs), targets).backward()
        optimizer.step()
    return list(model.parameters()), state


def test_a_single_process_trains_as_without_a_hook(alone: None) -> None:
    (ours, state), (bare, _) = train(dgcopt.DGC(0.01)), train(None)
    assert all(torch.equal(a, b) for a, b in zip(ours, bare, strict=True))
    assert state is not None and state.telemetry.sent_bytes == 0


def test_one_state_for_two_models_is_refused(alone: None) -> None:
    """It would take each backward pass of either for a step. A model that is put into DDP again is none."""
    model = nn.Linear(4, 1)
    for second in (model, nn.Linear(4, 1)):
        hook, modules = dgcopt.ddp_hook(dgcopt.DGC()), [DDP(model), DDP(second)]
        for module in modules:
            module.register_comm_hook(*hook)
        is_refused = pytest.raises(dgcopt.ConfigError, match="call ddp_hook once per module")
        with nullcontext() if second is model else is_refused:
            modules[1](torch.ones(1, 4)).sum().backward()


def test_state_of_more_ranks_is_refused_by_a_single_one(alone: None) -> None:
    state, _ = dgcopt.ddp_hook(dgcopt.DGC())
    state.load_state_dict({**state.state_dict(), "rank": 0, "world_size": 2})
    with pytest.raises(dgcopt.ConfigError, match=r"belongs to rank 0 of 2 .* on rank 0 of 1"):
        train(state)


def test_compressors_that_send_updates_are_refused() -> None:
    with pytest.raises(dgcopt.ConfigError, match=r"Adasum sends the updates .* use dgcopt\.DistributedOptimizer"):
        dgcopt.ddp_hook(dgcopt.Adasum())


def test_the_source_auto_becomes_gradient_in_front_of_any_optimizer() -> None:
    class Undecided(dgcopt.NoCompression):
        source = "auto"

    optimizer = torch.optim.Adam(small_model().parameters())
    given = Undecided()
    state, _ = dgcopt.ddp_hook(given, optimizer)
    assert state.compressor.source == "gradient" and given.source == "auto", "the hook has a copy of its own"
    state, _ = dgcopt.ddp_hook(dgcopt.FP16(dgcopt.TopK()), torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))]))
    assert state.compressor.sends == state.compressor.inner.sends == "gradient"


def test_distributed_optimizers_are_refused() -> None:
    model = small_model()
    (comm, _) = dgcopt.simulated_world(2, 1)
    optimizer = dgcopt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm=comm)
    with pytest.raises(dgcopt.ConfigError, match="the one that is not wrapped"):
        dgcopt.ddp_hook(dgcopt.DGC(), optimizer)


def test_a_second_optimizer_is_refused() -> None:
    state, _ = dgcopt.ddp_hook(dgcopt.DGC(), torch.optim.SGD(small_model().parameters(), lr=0.1))
    with pytest.raises(dgcopt.ConfigError, match="attach one optimizer"):
        state.attach(torch.optim.SGD(small_model().parameters(), lr=0.1))


def test_horovods_compression_objects_are_accepted() -> None:
    class Truncate:
        compress = staticmethod(lambda tensor: (tensor.half(), tensor.dtype))
        decompress = staticmethod(lambda tensor, dtype: tensor.to(dtype))

    state, _ = dgcopt.ddp_hook(Truncate)
    assert "Truncate" in repr(state.compressor)
    with pytest.raises(dgcopt.ConfigError, match=r"must be an instance: DGC\(\)"):
        dgcopt.ddp_hook(dgcopt.DGC)


def test_a_state_that_was_stored_before_training_keeps_its_settings() -> None:
    state, hook = dgcopt.ddp_hook(dgcopt.DGC(0.02, values="fp16"), torch.optim.SGD(small_model().parameters(), lr=0.1))
    again, same = dgcopt.ddp_hook(pickle.loads(pickle.dumps(state)))
    assert repr(again.compressor) == repr(state.compressor) and same is hook
    assert again.state_dict() == state.state_dict()


def test_memory_of_a_failed_step_has_absorbed_its_gradient_or_is_between_two_steps() -> None:
    state, _ = dgcopt.ddp_hook(dgcopt.DGC(0.1), comm=dgcopt.simulated_world(2)[0])
    bucket = bucket_of([nn.Parameter(torch.zeros(8, 8))])
    part, context = Part(bucket, [0], takes_sums=True), context_of(bucket, 0, 2)
    state._memory.contexts[part] = context
    param = bucket.segments[0].param
    param.grad = torch.ones(8, 8)
    with context.memory.absorbing():
        pass
    state._step.fail()
    assert not param.grad.any(), "memory has it"
    with suppress(MemoryError), context.memory.absorbing():
        raise MemoryError
    state._step.fail()
    with pytest.raises(dgcopt.InterruptedStep, match="while memory took"):
        state.state_dict()
