"""A hook trains like plain DDP, like torch's own hooks, and like DistributedOptimizer."""

import copy
import functools
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import dgcopt

from .registry import Scenario, registered_in
from .training import (
    RATIO,
    Training,
    assert_close,
    assert_same_on_all_ranks,
    batch,
    everyones,
    flat,
    in_optimizer,
    local_gradient,
    plain,
    sgd,
    small_model,
)

SCENARIOS: dict[str, Scenario] = {}
scenario = registered_in(SCENARIOS)


@scenario
def no_compression_is_plain_ddp() -> None:
    ours, theirs = Training(dgcopt.NoCompression()), Training()
    ours.step(0), theirs.step(0)
    first = list(ours.state._memory.layout)
    ours.run(7, first=1), theirs.run(7, first=1)
    rebuilt = list(ours.state._memory.layout)
    assert len(rebuilt) >= 3 and rebuilt != first, "DDP was to have several buckets, and to rebuild them"
    assert_close(ours.weights(), theirs.weights())


@scenario
def fp16_is_torchs_fp16_hook() -> None:
    ours, theirs, dense = Training(dgcopt.FP16(), plain), Training((None, fp16_compress_hook), plain), Training()
    for step in range(3):  # before and after buckets are rebuilt
        for other in (theirs, dense):
            other.model.load_state_dict(ours.model.state_dict())
            other.step(step)
        ours.step(step)
        # torch rounds before it divides, which is the same but for the smallest numbers that float16 knows
        torch.testing.assert_close(ours.gradients(), theirs.gradients(), rtol=2**-10, atol=2**-23)
        assert (ours.gradients() != theirs.gradients()).float().mean() < 0.01
        assert (ours.gradients() != dense.gradients()).float().mean() > 0.9


@scenario
def bf16_is_the_sum_of_halves_in_bf16() -> None:
    training = Training(dgcopt.BF16(), attach=False)
    for step in range(3):  # before and after buckets are rebuilt
        halves = [(g / 2).bfloat16() for g in everyones(local_gradient(training.model, step))]
        training.step(step)
        assert torch.equal(training.gradients(), (halves[0] + halves[1]).float())


@scenario
def dgc_is_dgc_in_distributed_optimizer() -> None:
    dense = Training().run().weights()
    for compressor in (
        dgcopt.DGC(RATIO),
        dgcopt.DGC(RATIO, overlap=True),
        dgcopt.DGC(RATIO, vectors="sparse", values="fp16", warmup=dgcopt.Warmup([0.5, 0.2], steps_per_epoch=2)),
        dgcopt.DGC(RATIO, clip=dgcopt.LocalClip(0.1, per="tensor")),
        dgcopt.DGC(RATIO, values="bf16", momentum_masking=False, residual="bf16"),
    ):
        ours, theirs = Training(compressor).run().weights(), in_optimizer(compressor)
        assert torch.equal(ours, theirs), compressor
        assert (ours - dense).abs().max() > 1e-3, "nothing was compressed"
    clipping = dgcopt.DGC(RATIO, clip=dgcopt.LocalClip(0.3))  # the norm is summed up bucket by bucket
    clipped = in_optimizer(clipping)
    assert_close(Training(clipping).run().weights(), clipped)
    assert (clipped - in_optimizer(dgcopt.DGC(RATIO))).abs().max() > 1e-3, "the threshold was never met"


@scenario
def rules_by_name_are_those_in_distributed_optimizer() -> None:
    for biases, weights in (
        (dgcopt.NoCompression(), dgcopt.DGC(RATIO)),
        (dgcopt.NoCompression(), dgcopt.DGC(RATIO, overlap=True)),
        (dgcopt.DGC(0.2, vectors="sparse"), dgcopt.DGC(RATIO, clip=dgcopt.LocalClip(0.1, per="tensor"))),
        (dgcopt.NoCompression(), dgcopt.DGC(RATIO, clip=dgcopt.LocalClip(1e9))),
    ):
        rules = dgcopt.PerParameter({"*.bias": biases, "2.*": dgcopt.TopK(0.2), "*": weights})
        training = Training(rules, named=True).run(4)
        again = Training()
        again.model.load_state_dict(training.model.state_dict())
        again.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
        again.state, hook = dgcopt.ddp_hook(
            pickle.loads(pickle.dumps(training.state)), again.optimizer, again.model.named_parameters()
        )
        again.ddp.register_comm_hook(again.state, hook)
        expected = in_optimizer(rules)
        assert torch.equal(training.run(4, first=4).weights(), expected), rules
        assert torch.equal(again.run(4, first=4).weights(), expected), "after what was kept went through a file"


@scenario
def rules_by_name_need_names() -> None:
    rules = dgcopt.PerParameter({"*.bias": dgcopt.NoCompression(), "*": dgcopt.DGC(RATIO)})
    with pytest.raises(dgcopt.ConfigError, match=r"'\*.bias' matches no parameter. Names are like parameter0"):
        Training(rules, attach=False).step(0)


@scenario
def dgc_at_ratio_one_is_plain_ddp_with_momentum() -> None:
    assert_close(Training(dgcopt.DGC(1.0)).run().weights(), Training().run().weights())


def mean_of_default_group(state: dict[str, int], bucket):
    """A hook with a state of its own that names no process group."""
    state["calls"] = state.get("calls", 0) + 1
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / dist.get_world_size())


@scenario
def hooks_of_others_do_in_DistributedOptimizer_what_they_do_in_DDP() -> None:
    def power(process_group=None) -> PowerSGDState:
        return PowerSGDState(process_group, matrix_approximation_rank=2, start_powerSGD_iter=3, min_compression_rate=1)

    for make_state, hook in (
        (lambda: None, allreduce_hook),
        (lambda: None, fp16_compress_hook),
        (lambda: dist.group.WORLD, lambda state, bucket: bf16_compress_hook(state, bucket)),  # DDP: not over gloo
        (power, powerSGD_hook),
        (functools.partial(power, dist.group.WORLD), fp16_compress_wrapper(powerSGD_hook)),
        (dict, mean_of_default_group),
    ):
        # one bucket each, as memory is kept by bucket
        training, replica, state = Training((make_state(), hook), bucket_cap_mb=25), small_model(), make_state()
        compression = dgcopt.from_ddp_hook(state, hook)
        optimizer = dgcopt.DistributedOptimizer(sgd(replica.parameters()), replica.named_parameters(), compression)
        for step in range(7):
            training.step(step)
            inputs, targets = batch(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(replica(inputs), targets).backward()
            optimizer.step()
        assert_same_on_all_ranks(flat(replica.parameters()))
        assert_close(flat(replica.parameters()), training.weights())
        assert state != {} or hook is not mean_of_default_group, "not the caller's state"


@scenario
def buffers_are_shared_as_in_ddp() -> None:
    """Parameters and batch norm's statistics are those that DDP broadcasts, as the next forward pass sees them."""

    def make() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(20, 9), nn.BatchNorm1d(9), nn.Linear(9, 5), nn.BatchNorm1d(5, momentum=None))

    training, replica = Training(model=make), make()
    optimizer = dgcopt.DistributedOptimizer(sgd(replica.parameters()), replica.named_parameters())
    dgcopt.sync_buffers(replica, optimizer)
    for step in range(5):
        training.step(step)
        inputs, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(replica(inputs), targets).backward()
        optimizer.step()
    training.ddp.eval()
    training.ddp(inputs)  # DDP shares them before a forward pass
    assert_close(training.weights(), flat(replica.parameters()))
    for (name, theirs), ours in zip(training.model.named_buffers(), replica.buffers(), strict=True):
        assert torch.allclose(theirs, ours, atol=1e-6), name
    assert_same_on_all_ranks(flat(replica.buffers()))
