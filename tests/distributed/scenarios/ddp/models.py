"""Unused parameters, unusual memory formats, sparse gradients, accumulation, closures and loss scaling."""

import copy
import functools

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dgcopt

from .registry import Scenario, registered_in
from .training import (
    RATIO,
    Branches,
    OddMemory,
    Training,
    assert_close,
    assert_same_on_all_ranks,
    batch,
    in_optimizer,
    mean,
    plain,
)

SCENARIOS: dict[str, Scenario] = {}
scenario = registered_in(SCENARIOS)


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


class Gated(Branches):
    """The second branch is in the graph of every step, and its gradient is zero in two of three."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.trunk(inputs).tanh()
        gate = float(self.calls % 3 == 0)
        self.calls += 1
        return self.always(hidden) + gate * self.rarely(hidden)


@scenario
def momentum_moves_parameters_whose_gradient_is_zero() -> None:
    """As in dense training; those that no rank has used too, if their gradient is there."""

    def run(hook: dgcopt.Compressor | None, **settings) -> Tensor:
        training = Training(hook, **settings)
        for step in range(6):
            training.optimizer.zero_grad(set_to_none=False)
            training.backward(step)
            training.optimizer.step()
        assert_same_on_all_ranks(training.weights())
        return training.weights()

    for settings in (
        {"model": Gated},
        {"model": Branches, "find_unused_parameters": True},
        {"model": Branches, "find_unused_parameters": True, "gradient_as_bucket_view": True},
    ):
        for compressor in (dgcopt.DGC(1.0), dgcopt.CSC(1.0)):
            assert_close(run(compressor, **settings), run(None, **settings))


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
