"""Exchanges of several buckets: rounds, labels, bytes, and DDP's own settings."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import dgcopt
from dgcopt.collectives import AllGather, AllReduce
from dgcopt.gradients.hook.ddp import HookState, exchange_bucket

from .models import Words
from .registry import Scenario, registered_in
from .training import RATIO, Training, assert_close, batch, in_optimizer, plain

SCENARIOS: dict[str, Scenario] = {}
scenario = registered_in(SCENARIOS)


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
def buckets_of_a_static_graph_that_is_made_anew() -> None:
    """Its first pass is not the state's first one; and DDP may know the state only within a user's."""

    def in_a_users(state: list[HookState], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return exchange_bucket(state[0], bucket)

    def run(is_static: bool) -> Tensor:
        training = Training(dgcopt.DGC(RATIO), model=Mixed, static_graph=is_static).run(3)
        for hook in ((training.state, exchange_bucket), ([training.state], in_a_users)):
            training.ddp = DDP(training.model, static_graph=is_static)
            training.ddp.register_comm_hook(*hook)
            training.run(3)
        state = HookState(dgcopt.DGC(RATIO))
        Training(([state], in_a_users), model=Mixed, static_graph=is_static).run(2)
        assert training.state.step == 9 and state.step == 2
        return training.weights()

    assert torch.equal(run(True), run(False))


@scenario
def bytes_are_counted() -> None:
    training = Training(dgcopt.NoCompression()).run(2)
    before = training.state.telemetry.sent_bytes
    training.step(2)
    parts = sum(-(-p.numel() // 64) * 64 for p in training.model.parameters())
    assert training.state.telemetry.sent_bytes - before == 4 * parts + 44  # half of it twice, and the vote
    assert training.state.telemetry.steps == 3
