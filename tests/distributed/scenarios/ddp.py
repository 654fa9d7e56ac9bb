"""Compressors as hooks of torch's DistributedDataParallel, on two real ranks."""

import contextlib
import copy
import functools
import io
import logging
import math
import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

import dgcopt
from dgcopt import Comm
from dgcopt.collectives import AllGather, AllReduce
from dgcopt.comm.torch import TorchComm
from dgcopt.gradients.hook.ddp import HookState

from .collectives import diagnosed_in_script

SCENARIOS: dict[str, Callable[[Comm], Any]] = {}
CPU = torch.device("cpu")
RATIO = 0.05


def scenario(run: Callable[[], None]) -> Callable[[], None]:
    """Adds it; the ranks are those of torch's default group, as DDP takes them."""
    SCENARIOS["ddp: " + run.__name__.replace("_", " ")] = lambda comm: run()
    return run


SCENARIOS["ddp: script is diagnosed"] = lambda comm: diagnosed_in_script(comm, "DDP")


# -- a model of several of DDP's buckets, and its training ------------------------------------------------------------


def small_model() -> nn.Module:
    torch.manual_seed(1)
    sizes = [(20, 90), (90, 70), (70, 80), (80, 5)]
    return nn.Sequential(*[layer for i, o in sizes for layer in (nn.Linear(i, o), nn.Tanh())][:-1])


def batch(step: int, rank: int | None = None, rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(rows, 20, generator=generator), torch.randint(5, (rows,), generator=generator)


def sgd(params: Iterator[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True)


def plain(params: Iterator[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


class Training:
    """A replica in DDP with a hook of dgcopt, another one, or none."""

    def __init__(self, hook=None, make=sgd, attach=True, model=small_model, scaler=None, named=False, **settings):
        self.model = model()
        self.ddp = DDP(self.model, **{"bucket_cap_mb": 0.01, **settings})
        self.optimizer = make(self.model.parameters())
        self.state: HookState | None = None
        if isinstance(hook, tuple):
            self.ddp.register_comm_hook(*hook)
        elif hook is not None:
            optimizer = self.optimizer if attach else None
            names = self.model.named_parameters() if named else None
            self.state, function = dgcopt.ddp_hook(hook, optimizer, names, scaler=scaler)
            self.ddp.register_comm_hook(self.state, function)

    def backward(self, step: int) -> None:
        inputs, targets = batch(step)
        nn.functional.cross_entropy(self.ddp(inputs), targets).backward()

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.backward(step)
        self.optimizer.step()

    def run(self, steps: int = 8, first: int = 0) -> "Training":
        for step in range(first, first + steps):
            self.step(step)
        assert_same_on_all_ranks(self.weights())
        return self

    def weights(self) -> Tensor:
        return flat(self.model.parameters())

    def gradients(self) -> Tensor:
        return flat(param.grad for param in self.model.parameters())

    def memory(self, kind: str = "residual") -> Tensor:
        """What is kept, in the order of the model's parameters; zero where nothing is."""
        assert self.state is not None
        names, held = self.state._memory.names, self.state.state_dict()["memory"].get(kind, {})
        return flat(held.get(names[param], torch.zeros_like(param)) for param in self.model.parameters())


def flat(tensors) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def everyones(tensor: Tensor) -> list[Tensor]:
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor.contiguous())
    return rows


def mean(tensor: Tensor) -> Tensor:
    return torch.stack(everyones(tensor)).mean(0)


def assert_same_on_all_ranks(tensor: Tensor) -> None:
    rows = everyones(tensor)
    assert all(torch.equal(row, rows[0]) for row in rows), "replicas drifted apart"


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def local_gradient(model: nn.Module, step: int) -> Tensor:
    """This rank's own, by autograd alone."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    inputs, targets = batch(step)
    nn.functional.cross_entropy(twin(inputs), targets).backward()
    return flat(torch.zeros_like(p) if p.grad is None else p.grad for p in twin.parameters())


def in_optimizer(compressor, steps: int = 8, make=sgd, model=small_model, forward=None) -> Tensor:
    """The weights that DistributedOptimizer comes to."""
    replica = model()
    optimizer = dgcopt.DistributedOptimizer(make(replica.parameters()), replica.named_parameters(), compressor)
    for step in range(steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(replica(inputs), targets).backward()
        optimizer.step()
    return flat(replica.parameters())


# -- the same as others ----------------------------------------------------------------------------------------------


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


class TwoRounds(dgcopt.Compressor):
    """Chained collectives, the second as long as the first says."""

    def exchange(self, grad, ctx):
        largest = yield AllReduce(grad.abs().amax().reshape(1), op="max")
        rows = yield AllGather(grad / largest)
        return rows.mean(0) * largest


@scenario
def what_an_exchange_leaves_between_parameters_is_gone() -> None:
    for compressor in (dgcopt.Hierarchical(dgcopt.EFSignSGD()), dgcopt.OneBit()):
        for dtype in (torch.float32, torch.bfloat16):
            training = Training(compressor, plain, model=lambda dtype=dtype: nn.Linear(20, 5).to(dtype))
            for step in range(20):
                training.optimizer.zero_grad()
                inputs, targets = batch(step)
                nn.functional.cross_entropy(training.ddp(inputs.to(dtype)), targets).backward()
                training.optimizer.step()
            assert training.weights().abs().max() < 10, f"{compressor} ran away: {training.weights().abs().max()}"


@scenario
def chained_collectives_of_several_buckets() -> None:
    ours = Training(TwoRounds(), find_unused_parameters=True).run(4)
    assert len(ours.state._memory.layout) >= 3
    assert_close(ours.weights(), Training(find_unused_parameters=True).run(4).weights())


@scenario
def labels_agree_where_some_ranks_have_more_rounds() -> None:
    compressor, labels = dgcopt.Hierarchical(dgcopt.DGC(RATIO)), []
    training = Training(compressor)
    comm = training.state.comm
    start = comm.start

    def noting(collective):
        if comm.size_of(collective.group) > 1:
            labels.append(collective.label)
        return start(collective)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "start", noting)
        training.run(3)
    theirs = [None, None]
    dist.all_gather_object(theirs, labels)
    assert theirs[0] == theirs[1] and any(label.endswith("round 1") for label in labels)
    assert torch.equal(training.run(5, first=3).weights(), in_optimizer(compressor))


class ThreeRounds(dgcopt.Compressor):
    """Notes which bucket begins which round."""

    def __init__(self, in_turn: bool) -> None:
        self.in_turn = in_turn
        self._begun: list[tuple[int, int]] = []

    def exchange(self, grad, ctx):
        for round in range(3):
            self._begun.append((ctx.index, round))
            yield AllReduce(torch.zeros(1))
        return grad


@scenario
def buckets_go_round_by_round_or_in_turn() -> None:
    for in_turn in (False, True):
        training = Training(ThreeRounds(in_turn))
        for step in range(2):  # before and after buckets are rebuilt
            training.state.compressor._begun.clear()
            training.step(step)
            buckets = range(len(training.state._memory.layout))
            by_round = [(index, round) for round in (1, 2) for index in buckets]
            by_bucket = [(index, round) for index in buckets for round in (1, 2)]
            expected = [(index, 0) for index in buckets] + (by_bucket if in_turn else by_round)
            assert training.state.compressor._begun == expected
        assert len(buckets) >= 2


@scenario
def ddp_settings_make_no_difference() -> None:
    usual = Training(dgcopt.DGC(RATIO)).run().weights()
    for settings in (
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 25},
    ):
        assert torch.equal(Training(dgcopt.DGC(RATIO), **settings).run().weights(), usual), settings


class Mixed(nn.Module):
    """Parameters of two dtypes, which DDP has in two buckets from the first pass on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(20, 30), nn.Linear(30, 5).double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs).tanh().double()).float()


@scenario
def buckets_that_static_graph_does_not_count() -> None:
    """In its first pass DDP calls all of them the first one, and none the last."""
    for compressor in (dgcopt.NoCompression(), dgcopt.DGC(RATIO), dgcopt.DGC(RATIO, overlap=True)):
        usual = Training(compressor, model=Mixed).run()
        static = Training(compressor, model=Mixed, static_graph=True).run()
        assert len({part.bucket.segments[0].param.dtype for part in static.state._memory.contexts}) == 2
        assert torch.equal(static.weights(), usual.weights()), compressor
    ours = Training(dgcopt.NoCompression(), plain, model=Words, static_graph=True).run(4)
    assert_close(ours.weights(), Training(make=plain, model=Words).run(4).weights())


@scenario
def no_sync_adds_up() -> None:
    def run(hook) -> Tensor:
        training = Training(hook)
        for step in range(0, 12, 3):
            training.optimizer.zero_grad()
            with training.ddp.no_sync():
                training.backward(step)
                training.backward(step + 1)
            training.backward(step + 2)
            training.optimizer.step()
        assert hook is None or training.state.step == 4
        return training.weights()

    dense = run(None)
    assert_close(run(dgcopt.NoCompression()), dense)
    assert_close(run(dgcopt.DGC(1.0)), dense)


@scenario
def a_closure_is_called_before_momentum_is_taken_over() -> None:
    def run(**how) -> Tensor:
        training = Training(dgcopt.DGC(RATIO))
        for step in range(6):

            def closure(step: int = step) -> None:
                training.optimizer.zero_grad()
                training.backward(step)

            if how["closure"]:
                training.optimizer.step(closure)
            else:
                closure()
                training.optimizer.step()
        return training.weights()

    assert torch.equal(run(closure=True), run(closure=False))


# -- odd models ------------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Of two branches, the second is used by rank 1 in every third step, and by no rank in the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk = nn.Linear(20, 100)
        self.always, self.rarely = nn.Linear(100, 5), nn.Linear(100, 5)
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.trunk(inputs).tanh()
        rare = dist.get_rank() == 1 and self.calls % 3 == 0
        self.calls += 1
        return self.always(hidden) + self.rarely(hidden) if rare else self.always(hidden)


@scenario
def unused_parameters_keep_what_is_held_back() -> None:
    for compressor in (dgcopt.DGC(RATIO), dgcopt.DGC(RATIO, vectors="int8", overlap=True)):
        ours = Training(compressor, model=Branches, find_unused_parameters=True).run(7)
        assert torch.equal(ours.weights(), in_optimizer(compressor, 7, model=Branches)), compressor
    held = mean(ours.state.state_dict()["memory"]["residual"]["group0.parameter4"])
    assert held.abs().sum() > 0, "something was to be held back of the branch"
    ours.step(7)  # in which nobody uses it
    assert ours.model.rarely.weight.grad is None
    assert torch.equal(mean(ours.state.state_dict()["memory"]["residual"]["group0.parameter4"]), held)


@scenario
def unused_parameters_without_a_hook_of_momentum() -> None:
    ours = Training(dgcopt.NoCompression(), model=Branches, find_unused_parameters=True).run(7)
    assert_close(ours.weights(), Training(model=Branches, find_unused_parameters=True).run(7).weights())


class OddMemory(nn.Module):
    """Parameters whose elements lie in other orders, and one without any."""

    def __init__(self, odd: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(2, 6, (2, 3))
        self.turned = nn.Parameter(torch.randn(5, 78).t().clone(memory_format=torch.contiguous_format))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.double()  # so that rounding in another order does not change what is selected
        if odd:
            self.conv.to(memory_format=torch.channels_last)
            self.turned.data = self.turned.data.t().contiguous().t()

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.double()
        hidden = self.conv(torch.cat([inputs, inputs**2, inputs + 1, inputs.sin()], 1).view(-1, 2, 2, 20)).flatten(1)
        return hidden[:, :78] @ self.turned + self.empty.sum()


@scenario
def parameters_in_any_memory_order() -> None:
    for compressor in (dgcopt.NoCompression(), dgcopt.DGC(0.1), dgcopt.DGC(1.0)):
        ours = Training(compressor, model=OddMemory).run(5)
        assert not ours.model.turned.is_contiguous() and not ours.model.conv.weight.is_contiguous()
        usual = Training(compressor, model=functools.partial(OddMemory, odd=False)).run(5)
        assert_close(ours.weights(), usual.weights(), 1e-5)
    dense, resumed = Training(model=OddMemory).run(3), Training(dgcopt.DGC(1.0), model=OddMemory)
    resumed.model.load_state_dict(dense.model.state_dict())
    resumed.optimizer.load_state_dict(dense.optimizer.state_dict())  # whose momentum is taken over
    assert_close(resumed.run(3, first=3).weights(), dense.run(3, first=3).weights())


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.out = nn.Embedding(30, 8, sparse=True), nn.Linear(8, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.words((inputs.abs() * 9).long().clamp(max=29)).mean(1))


@scenario
def sparse_gradients_travel_as_rows() -> None:
    ours = Training(dgcopt.NoCompression(), plain, model=Words).run(4)
    assert ours.model.words.weight.grad.is_sparse
    assert_close(ours.weights(), Training(make=plain, model=Words).run(4).weights())


# -- promises --------------------------------------------------------------------------------------------------------


class Muted(Branches):
    """Both branches are always used, but in most steps the second one's gradient is zero on all ranks."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.trunk(inputs).tanh()
        self.calls += 1
        return self.always(hidden) + self.rarely(hidden) * float(self.calls % 3 == 1)


@scenario
def what_is_not_sent_is_kept() -> None:
    for model in (small_model, Muted, OddMemory):
        training = Training(dgcopt.DGC(RATIO), plain, attach=False, model=model)
        start, gradients = training.weights(), 0.0
        for step in range(6):
            gradients = gradients + local_gradient(training.model, step)
            training.step(step)
        assert training.memory().abs().sum() > 0
        assert_close((start - training.weights()) / 0.1 + mean(training.memory()), mean(gradients), 1e-5)


@scenario
def pickled_state_continues_with_the_same_bits() -> None:
    # scales of int8 and int2 depend on what shares a bucket, which stays as it is where DDP looks for unused parameters
    for compressor, how in (
        (dgcopt.DGC(RATIO), {"named": True}),
        (dgcopt.DGC(RATIO, overlap=True), {}),
        (dgcopt.DGC(RATIO), {"attach": False}),
        (dgcopt.DGC.compact(RATIO, warmup=None), {"find_unused_parameters": True}),
        (dgcopt.FP16(), {}),
    ):
        training, file = Training(compressor, **how).run(4), io.BytesIO()
        parts = {"model": training.model, "optimizer": training.optimizer}
        torch.save({"hook": training.state, **{name: part.state_dict() for name, part in parts.items()}}, file)
        there = training.run(4, first=4).weights()
        file.seek(0)
        saved = torch.load(file, weights_only=False)
        again = Training(saved["hook"], **how)
        again.model.load_state_dict(saved["model"])
        again.optimizer.load_state_dict(saved["optimizer"])
        assert torch.equal(again.run(4, first=4).weights(), there), (compressor, how)
        assert again.state.step == 8


@scenario
def state_of_another_compressor_is_sent() -> None:
    """What DGC held back comes with the gradient of one of the next steps, where nothing is held back any more."""
    before = Training(dgcopt.DGC(RATIO), plain).run(3)
    held = mean(before.memory())
    ours, theirs = (Training(dgcopt.NoCompression(), plain) for _ in range(2))
    for other in (ours, theirs):
        other.model.load_state_dict(before.model.state_dict())
    ours.state.load_state_dict(before.state.state_dict())
    for step in range(3, 9):
        ours.step(step)
        theirs.step(step)
        if not mean(ours.memory().abs()).any():
            break
        assert_close(ours.weights(), theirs.weights())
    assert held.any() and step < 7
    assert_close(ours.gradients(), theirs.gradients() + held)


@scenario
def state_of_another_rank_is_refused() -> None:
    training = Training(dgcopt.DGC(RATIO)).run(2)
    state = {**training.state.state_dict(), "rank": 1 - dist.get_rank()}
    other = Training(dgcopt.DGC(RATIO))
    other.state.load_state_dict(state)
    with pytest.raises(dgcopt.ConfigError, match=r"belongs to rank \d of 2 .* Let every rank save"):
        other.step(0)


@scenario
def an_optimizer_made_anew_is_noticed() -> None:
    """The hook has taken over the momentum of the one that it was given, which another would apply once more."""
    training = Training(dgcopt.DGC(1.0))
    training.optimizer = sgd(training.model.parameters())
    training.backward(0)
    with pytest.raises(
        dgcopt.ConfigError, match=r"never stepped.* would be applied twice.* state\.attach\(optimizer\)"
    ):
        training.optimizer.step()
    again = Training(dgcopt.DGC(1.0))
    again.optimizer = sgd(again.model.parameters())
    again.state.attach(again.optimizer)
    assert_close(again.run(4).weights(), Training().run(4).weights())


@scenario
def a_setting_that_one_rank_changes_is_told_before_weights_move() -> None:
    training, untouched = (Training(dgcopt.DGC(RATIO)).run(3) for _ in range(2))
    training.optimizer.param_groups[0]["weight_decay"] = 0.02 if dist.get_rank() else 0.01
    with pytest.raises(dgcopt.MismatchError, match=r"weight_decay of parameter group 0: 0\.01\], rank 1 has .*0\.02"):
        training.step(3)
    assert torch.equal(training.weights(), untouched.weights())
    assert training.state is not None and training.state.step == 3
    model, rank = small_model(), dist.get_rank()
    optimizer, ddp = torch.optim.SGD(model.parameters(), 0.1 + rank), DDP(model)
    ddp.register_comm_hook(*dgcopt.ddp_hook(dgcopt.DGC(RATIO), optimizer, may_differ=("lr",)))
    for step in range(2):
        nn.functional.cross_entropy(ddp(batch(step)[0]), batch(step)[1]).backward()


@scenario
def ddp_of_fewer_ranks_than_the_hook_is_refused() -> None:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    training = Training(dgcopt.DGC(RATIO), process_group=alone)
    with pytest.raises(dgcopt.ConfigError, match=r"averages among 1 rank\(s\), .* among 2: .* comm="):
        training.step(0)


@scenario
def one_optimizer_of_more_than_a_model_in_ddp() -> None:
    """Its momentum is taken over for all that it steps: of what no hook exchanges, too, where it would be lost."""

    def run(first: Any, second: Any) -> Tensor:
        parts = small_model()
        front, back = parts[:4], parts[4:]
        optimizer, models = sgd(parts.parameters()), [DDP(front), DDP(back)]
        for model, compressor in zip(models, (first, second), strict=True):
            if compressor is not None:
                model.register_comm_hook(*dgcopt.ddp_hook(compressor, optimizer, parts.named_parameters()))
        for step in range(4):
            inputs, targets = batch(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(models[1](models[0](inputs)), targets).backward()
            optimizer.step()
        return flat(parts.parameters())

    dense = run(None, None)
    assert_close(run(dgcopt.DGC(1.0), dgcopt.DGC(1.0)), dense)
    assert_close(run(dgcopt.NoCompression(), None), dense)
    with pytest.raises(
        dgcopt.ConfigError, match=r"steps parameter '4\.weight'.* no ddp_hook averages.* optimizer of its own"
    ):
        run(dgcopt.DGC(RATIO), None)


@scenario
def gradients_exchanged_without_a_step_are_noticed() -> None:
    """What DGC keeps counts all of them, also where the next pass, or nothing, is made of them."""

    def said(compressor: Any, passes: int, quietly: bool = False) -> list[str]:
        training, records = Training(compressor), logging.Handler()
        texts: list[str] = []
        records.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("dgcopt").addHandler(records)
        for step in range(3):
            training.optimizer.zero_grad()
            for _ in range(passes - 1):
                with training.ddp.no_sync() if quietly else contextlib.nullcontext():
                    training.backward(step)
            training.backward(step)
            training.optimizer.step()
        logging.getLogger("dgcopt").removeHandler(records)
        return texts

    (text,) = said(dgcopt.DGC(RATIO), 2)
    assert "has not stepped" in text and "no_sync()" in text
    assert not said(dgcopt.DGC(RATIO), 1) and not said(dgcopt.DGC(RATIO), 2, quietly=True)
    assert not said(dgcopt.NoCompression(), 2), "which keeps nothing"


@scenario
def other_optimizers_and_loaded_weights_are_no_mistake() -> None:
    """Steps of another model; weights loaded after a backward pass; a wrapper that is an optimizer itself."""
    training = Training(dgcopt.DGC(1.0))
    training.backward(0)
    training.model.load_state_dict(small_model().state_dict())
    other = nn.Parameter(torch.ones(2, requires_grad=True))
    other.grad = torch.ones(2)
    plain(iter([other])).step()

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure=None):
            return self.inner.step(closure)

    training.optimizer = Wrapper(training.optimizer)
    training.run(2, first=1)


@scenario
def settings_that_differ_over_ranks_are_noticed() -> None:
    training = Training(dgcopt.DGC(RATIO))
    training.optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * dist.get_rank()
    with pytest.raises(dgcopt.MismatchError, match=r"lr of parameter group 0: 0\.1\], rank 1 has \[lr .*0\.2"):
        training.backward(0)


@scenario
def a_distributed_optimizer_beside_ddp_is_noticed() -> None:
    """DDP's dense gradients would travel beside ours; not with a hook of the user's, no_sync, or DDP of some ranks."""

    class Subclass(DDP):
        pass

    def warnings_of(step: Callable[[DDP], None], kind: type[DDP] = DDP, **settings) -> list[str]:
        model, records = small_model(), logging.Handler()
        said: list[str] = []
        records.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        ddp = kind(model, **settings)
        optimizer = dgcopt.DistributedOptimizer(sgd(model.parameters()), compression=dgcopt.DGC(RATIO))
        logging.getLogger("dgcopt").addHandler(records)
        step(ddp)
        optimizer.step()
        logging.getLogger("dgcopt").removeHandler(records)
        assert_same_on_all_ranks(flat(model.parameters()))
        return [text for text in said if "DistributedDataParallel averages" in text]

    def backward(ddp: nn.Module) -> None:
        inputs, targets = batch(0)
        nn.functional.cross_entropy(ddp(inputs), targets).backward()

    def quiet(ddp: DDP) -> None:
        with ddp.no_sync():
            backward(ddp)

    def hooked(ddp: DDP) -> None:
        ddp.register_comm_hook(None, noop_hook)
        backward(ddp)

    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    first = dist.get_rank() == 0
    assert len(warnings_of(backward)) == len(warnings_of(backward, Subclass)) == first
    assert not warnings_of(quiet) and not warnings_of(hooked) and not warnings_of(backward, process_group=alone)


@scenario
def state_of_another_model_is_refused() -> None:
    state = Training(dgcopt.DGC(RATIO)).run(2).state.state_dict()
    other = Training(dgcopt.DGC(RATIO), model=OddMemory)
    other.state.load_state_dict(state)
    with pytest.raises(dgcopt.ConfigError, match=r"knows parameter 'group0\.parameter0' with shape .*build the same"):
        other.step(0)


@scenario
def nan_on_one_rank_leaves_memory_untouched() -> None:
    for compressor in (dgcopt.DGC(RATIO), dgcopt.DGC(RATIO, overlap=True), dgcopt.DGC(RATIO, vectors="sparse")):
        training = Training(compressor).run(3)
        before = copy.deepcopy(training.state.state_dict())
        training.optimizer.zero_grad()
        inputs, targets = batch(3)
        inputs[0, 0] = torch.inf if dist.get_rank() == 1 else 0
        nn.functional.cross_entropy(training.ddp(inputs), targets).backward()
        assert training.gradients().isnan().all()
        after = training.state.state_dict()
        assert after.pop("made_of") == before.pop("made_of"), "which are words, that torch does not compare"
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        assert training.state.telemetry.skipped == 1
        twin = Training(compressor).run(3)
        assert torch.equal(training.run(3, first=4).weights(), twin.run(3, first=4).weights())


@scenario
def loss_scaling_changes_nothing() -> None:
    def run(scaled: bool, compressor, overflow: int | None = None) -> tuple[Training, list[float]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3, enabled=scaled)
        training, scales = Training(compressor, scaler=scaler), []
        for step in range(9):
            if step == overflow and not scaled:
                continue
            training.optimizer.zero_grad()
            inputs, targets = batch(step)
            loss = nn.functional.cross_entropy(training.ddp(inputs), targets)
            if step == overflow and dist.get_rank() == 0:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            scaler.step(training.optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert_same_on_all_ranks(training.weights())
        return training, scales

    for compressor in (dgcopt.DGC(RATIO), dgcopt.DGC(RATIO, clip=dgcopt.LocalClip(0.5)), dgcopt.NoCompression()):
        with_scaler, scales = run(True, compressor, overflow=4)
        assert scales == [64, 64, 128, 128, 64, 64, 64, 128, 128]
        without, _ = run(False, compressor, overflow=4)
        assert torch.equal(with_scaler.weights(), without.weights())
        assert torch.equal(with_scaler.memory(), without.memory())


@scenario
def join_serves_ranks_that_have_more_data() -> None:
    """Rank 0 runs out of data first. Averages divide by all ranks, or by those that have data, as DDP is told."""

    def run(hook, by_all: bool = True) -> Training:
        training = Training(hook, plain)
        with training.ddp.join(divide_by_initial_world_size=by_all):
            for step in range(4 + 3 * dist.get_rank()):
                training.step(step)
        assert_same_on_all_ranks(training.weights())
        training.run(2, first=7)
        return training

    dense = {by_all: run(None, by_all).weights() for by_all in (True, False)}
    assert not torch.allclose(dense[True], dense[False], atol=1e-3)
    for by_all, weights in dense.items():
        for compressor in (dgcopt.NoCompression(), dgcopt.DGC(1.0, overlap=True), dgcopt.DGC(1.0)):
            training = run(compressor, by_all)
            assert_close(training.weights(), weights)
            assert training.state.telemetry.repeated == (
                0 if by_all or not training.state.compressor.overlaps(CPU) else 2
            )
        assert training.state.step == 9
        assert run(dgcopt.DGC(RATIO), by_all).memory().abs().sum() > 0


@scenario
def join_is_that_of_distributed_optimizer() -> None:
    """With what each rank held back when it ran out of data, and when others did."""
    most = 7
    for by_all in (True, False):
        training = Training(dgcopt.DGC(RATIO), plain)
        with training.ddp.join(divide_by_initial_world_size=by_all):
            for step in range(4 + 3 * dist.get_rank()):
                training.step(step)
        replica = small_model()
        optimizer = dgcopt.DistributedOptimizer(
            plain(replica.parameters()), replica.named_parameters(), dgcopt.DGC(RATIO)
        )
        with dgcopt.join(optimizer, divide_by="all" if by_all else "active"):
            for step in range(4 + 3 * dist.get_rank()):
                inputs, targets = batch(step)
                optimizer.zero_grad()
                nn.functional.cross_entropy(replica(inputs), targets).backward()
                optimizer.step()
        assert training.state.step == optimizer.telemetry.steps == most
        assert_close(training.weights(), flat(replica.parameters()))
        assert math.isclose(training.memory().norm(), optimizer.residual_norm(), rel_tol=1e-6)


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


@scenario
def uneven_data_of_two_models() -> None:
    """One in DDP, one of ours, in one loop: each ends as it would by itself, in either order and join."""

    def torchs(*members: Any, divide_by: str) -> Join:
        return Join([*members], divide_by_initial_world_size=divide_by == "all")

    found = []
    for order, divide_by, join in (
        ("do", "active", dgcopt.join),
        ("do", "active", torchs),
        ("d", "active", dgcopt.join),
        ("o", "active", dgcopt.join),
        ("od", "all", dgcopt.join),
        ("od", "all", torchs),
        ("d", "all", dgcopt.join),
        ("o", "all", dgcopt.join),
    ):
        training, replica = Training(make=plain), small_model()
        optimizer = dgcopt.DistributedOptimizer(plain(replica.parameters()), replica.named_parameters())
        members = {"d": training.ddp, "o": optimizer}
        with join(*(members[each] for each in order), divide_by=divide_by):
            for step in range(4 + 3 * dist.get_rank()):
                for each in order:
                    if each == "d":
                        training.step(step)
                    else:
                        inputs, targets = batch(step)
                        optimizer.zero_grad()
                        nn.functional.cross_entropy(replica(inputs), targets).backward()
                        optimizer.step()
        found.append({"d": training.weights(), "o": flat(replica.parameters())})
    for *both, first, second in (found[:4], found[4:]):
        for together in both:
            assert_close(together["d"], first["d"])
            assert_close(together["o"], second["o"])
    with pytest.raises(dgcopt.ConfigError, match="only if it is the first"), dgcopt.join(optimizer, training.ddp):
        pass
    from torch.distributed.optim import ZeroRedundancyOptimizer  # half a second, which no other rank has to wait for

    zero = ZeroRedundancyOptimizer(training.model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(dgcopt.ConfigError, match="own last batch"), dgcopt.join(training.ddp, zero):
        pass
    with pytest.raises(RuntimeError, match="exhausted"), dgcopt.join(training.ddp, throw_on_early_termination=True):
        for step in range(4 + 3 * dist.get_rank()):
            training.step(step)
    averaged = dgcopt.LocalSGD(plain(replica.parameters()))
    with pytest.raises(dgcopt.ConfigError, match="averaged weights"), dgcopt.join(training.ddp, averaged):
        pass


@scenario
def bytes_are_counted() -> None:
    training = Training(dgcopt.NoCompression()).run(2)
    before = training.state.telemetry.sent_bytes
    training.step(2)
    parts = sum(-(-p.numel() // 64) * 64 for p in training.model.parameters())
    assert training.state.telemetry.sent_bytes - before == 4 * parts + 44  # half of it twice, and the vote
    assert training.state.telemetry.steps == 3


@scenario
def ranks_that_differ_are_told_how() -> None:
    rank = dist.get_rank()
    for training, what in (
        (Training(dgcopt.DGC(0.01 * (1 + rank))), r"ratio=0\.01.*ratio=0\.02"),
        (Training(dgcopt.FP16() if rank else dgcopt.BF16()), "BF16.*FP16"),
        (Training(dgcopt.FP16(), attach=rank == 0), "SGD.*NoneType"),
    ):
        with pytest.raises(dgcopt.MismatchError, match=what):
            training.step(0)
    training = Training(dgcopt.DGC(RATIO)).run(2)
    training.state.compressor.ratio *= 1 + rank
    with pytest.raises(dgcopt.MismatchError, match=r"ratio=0\.05.*ratio=0\.1"):
        training.step(2)
    training = Training(dgcopt.TopK(RATIO)).run(2)
    training.state.compressor.ratio *= 2  # on all ranks alike
    training.step(2)
    training = Training(dgcopt.DGC(RATIO)).run(2)
    training.state._memory.step += rank
    with pytest.raises(dgcopt.MismatchError, match="rank 0 is at step 2, rank 1 is at step 3"):
        training.step(2)


@scenario
def a_rank_that_does_not_come_is_named() -> None:
    """The last one, as it breaks the wire."""
    training = Training(dgcopt.DGC(RATIO))
    comm = TorchComm(deadline=60)
    training.state.use(None, comm, None)
    training.run(2)
    comm.deadline = 2
    if dist.get_rank() == 0:
        with pytest.raises(dgcopt.TimeoutExceeded, match=r"rank 0 waited 2 s for .* needs rank\(s\) 1"):
            training.step(2)
    else:
        records = Path(os.environ["DGCOPT_TEST_RECORDS"]) / "rank-0.jsonl"
        while "a rank that does not come" not in records.read_text():
            time.sleep(0.1)
