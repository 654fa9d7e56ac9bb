"""Ranks whose settings, steps or process groups differ, and a rank that does not come."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import dgcopt
from dgcopt.comm.torch import TorchComm

from .registry import Scenario, registered_in
from .training import RATIO, Training, batch, small_model

SCENARIOS: dict[str, Scenario] = {}
scenario = registered_in(SCENARIOS)


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


class WithoutItsFirstLayer(nn.Module):
    """A model whose last bucket holds an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = small_model()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers[2:](inputs.repeat(1, 5)[:, :90])


@scenario
def buckets_that_ddp_skips_are_refused() -> None:
    """None would be marked as the last one, and the step would wait for it forever."""
    how = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    training = Training(dgcopt.DGC(RATIO), model=WithoutItsFirstLayer, **how)
    with pytest.raises(dgcopt.ConfigError, match="skip_all_reduce_unused_params=True keeps buckets from ddp_hook"):
        training.step(0)


@scenario
def settings_that_differ_over_ranks_are_noticed() -> None:
    training = Training(dgcopt.DGC(RATIO))
    training.optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * dist.get_rank()
    with pytest.raises(dgcopt.MismatchError, match=r"lr of parameter group 0: 0\.1\], rank 1 has \[lr .*0\.2"):
        training.backward(0)


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
